// The thread that copies snapshots beside the executor. A device server is a fork, so it is not started
// before the first snapshot.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "proxy_server/csrc/snapshots/copy_list.h"

namespace understudy::server {

class Copier {
 public:
  // `tell`: called by the thread whenever a list has come to its end by itself.
  explicit Copier(std::function<void()> tell) : tell_(std::move(tell)) {}
  ~Copier();

  // Copies in the thread; false if there can be none.
  bool start(std::shared_ptr<CopyList> list);
  // Returns when the thread does not touch the list any more.
  void wait();
  void stop();  // ... and cuts it short
  // Processor time of the thread.
  uint64_t nanoseconds() const { return nanoseconds_.load(std::memory_order_relaxed); }

 private:
  void main();

  const std::function<void()> tell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<CopyList> list_;
  bool ending_ = false;
  std::atomic<uint64_t> nanoseconds_{0};
  std::thread thread_;
};

}  // namespace understudy::server
