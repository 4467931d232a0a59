#include "proxy_server/csrc/collectives/waiters.h"

#include <chrono>
#include <deque>
#include <thread>
#include <utility>

namespace understudy::server {

namespace {
constexpr std::chrono::milliseconds kLook{20};  // for who may be given up
}

class WaiterPool {
 public:
  void add(std::shared_ptr<Waiting> waiting) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(waiting));
    if (idle_ < queue_.size())
      std::thread([this] { serve(); }).detach();
    else
      added_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      idle_++;
      added_.wait(lock, [this] { return !queue_.empty(); });
      idle_--;
      const std::shared_ptr<Waiting> waiting = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      waiting->run();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::shared_ptr<Waiting>> queue_;
  size_t idle_ = 0;
};

std::shared_ptr<Waiting> Waiting::begin(std::function<void()> wait) {
  static WaiterPool& pool = *std::make_unique<WaiterPool>().release();  // its threads end with the process
  auto waiting = std::make_shared<Waiting>();
  waiting->wait_ = std::move(wait);
  pool.add(waiting);
  return waiting;
}

void Waiting::run() {
  std::exception_ptr problem;
  try {
    wait_();
  } catch (...) {
    problem = std::current_exception();
  }
  wait_ = nullptr;  // it may hold a communicator, which must not live as long as this
  std::lock_guard<std::mutex> lock(mutex_);
  problem_ = problem;
  over_ = true;
  changed_.notify_all();
}

void Event::tell() {
  std::lock_guard<std::mutex> lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

void Event::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return over_; });
}

bool Event::is_over() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

bool Waiting::is_over() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

bool Waiting::wait(const std::function<bool()>& given_up) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return over_; }))
    if (given_up()) return false;
  if (problem_) std::rethrow_exception(problem_);
  return true;
}

}  // namespace understudy::server
