#include "replay/csrc/life/life_hold.h"

#include <pthread.h>
#include <signal.h>

#include "replay/csrc/life/life_word.h"
#include "replay/csrc/log/futex.h"

namespace understudy::replay {
namespace {

constexpr long kHourMs = 3600000;

}  // namespace

LifeHold::LifeHold() {
  head_.list.next = &head_.list;
  sigset_t all, before;  // signals are for others
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  thread_id_.wait(0);
}

LifeHold::~LifeHold() {
  let_go();
  stop_.store(1);
  futex_wake(stop_);
  thread_.join();
}

void LifeHold::run() {
  pthread_setname_np(pthread_self(), "life");
  kept_ = syscall(SYS_set_robust_list, &head_, sizeof head_) == 0;
  thread_id_.store(static_cast<uint32_t>(syscall(SYS_gettid)));
  thread_id_.notify_all();
  while (stop_.load() == 0) futex_wait(stop_, 0, kHourMs);
}

void LifeHold::hold(std::atomic<uint32_t>& word) {
  if (!kept_) return;  // nobody would mark it
  const uint32_t ours = held_by(thread_id_.load());
  if (word_ == &word && word.load() == ours) return;
  let_go();
  word_ = &word;
  head_.futex_offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&link_);
  link_.next = &head_.list;
  // The kernel reads the list when the thread ends, which may be at any instant.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  head_.list.next = &link_;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  word.store(ours);
  futex_wake(word);
}

void LifeHold::let_go() {
  if (word_ == nullptr) return;
  uint32_t ours = held_by(thread_id_.load());
  if (word_->compare_exchange_strong(ours, kNobody)) futex_wake(*word_);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  head_.list.next = &head_.list;
  word_ = nullptr;
}

}  // namespace understudy::replay
