// What other threads ask of a rank while its records run; whoever runs them looks here.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace understudy::server {

class Requests {
 public:
  // To stand still before the next record.
  void park() {
    only_hold_.store(false);
    park_.store(true);
  }
  // That, but not amid a step without pre-images; it may be taken back.
  void hold() {
    only_hold_.store(true);
    park_.store(true);
  }
  void take_back() { park_.store(false); }
  // Of either kind.
  bool to_park(std::memory_order order = std::memory_order_seq_cst) const { return park_.load(order); }
  bool to_park_anywhere() const { return !only_hold_.load(); }
  // Whoever parks a rank takes it back, to before what fails meanwhile; whoever holds it may let it go on.
  bool goes_back_anyway() const { return to_park() && to_park_anywhere(); }

  // Which buffers replicas hold too, from the next commit on.
  void set_replicated(std::vector<uint64_t> handles) {
    std::lock_guard<std::mutex> lock(mutex_);
    replicated_ = std::move(handles);
  }
  std::optional<std::vector<uint64_t>> take_replicated() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(replicated_, std::nullopt);
  }

 private:
  std::atomic<bool> park_{false}, only_hold_{false};
  std::mutex mutex_;
  std::optional<std::vector<uint64_t>> replicated_;
};

}  // namespace understudy::server
