#include "proxy_server/csrc/snapshots/copier.h"

#include <ctime>
#include <system_error>

namespace understudy::server {
namespace {
uint64_t processor_ns() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}
}  // namespace

Copier::~Copier() {
  stop();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Copier::start(std::shared_ptr<CopyList> list) {
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { main(); });
    } catch (const std::system_error&) {
      return false;
    }
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return list_ == nullptr; });  // it may still be leaving a finished one
    list_ = std::move(list);
  }
  changed_.notify_all();
  return true;
}

void Copier::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return list_ == nullptr; });
}

void Copier::stop() {
  std::unique_lock lock(mutex_);
  if (list_) list_->cancel();
  changed_.wait(lock, [this] { return list_ == nullptr; });
}

void Copier::main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || list_ != nullptr; });
    if (ending_) return;
    CopyList& list = *list_;
    lock.unlock();
    list.run();
    nanoseconds_.store(processor_ns(), std::memory_order_relaxed);
    const bool tell = !list.cancelled();
    lock.lock();
    list_.reset();
    changed_.notify_all();
    if (!tell) continue;
    lock.unlock();
    tell_();
    lock.lock();
  }
}

}  // namespace understudy::server
