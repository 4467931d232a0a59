// What the lock-free parts stand on: atomics, a lock, and an event to sleep on.  Tests have another one.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "replay/csrc/log/futex.h"

namespace understudy::persistence {

constexpr uint64_t kNever = UINT64_MAX;  // a deadline, in replay::now_ns()

// Something happens now and then.  Read now(), look whether there is something to do, and only then wait for
// more than that: what happens in between is not missed.
class Event {
 public:
  uint32_t now() const { return count_.load(std::memory_order_acquire); }

  void raise() {
    count_.fetch_add(1, std::memory_order_acq_rel);
    replay::futex_wake(count_);
  }

  // Returns when something happened since `seen`, at the deadline, or a little early.
  void wait(uint32_t seen, uint64_t deadline) {
    const uint64_t now = replay::now_ns();
    if (now >= deadline) return;
    constexpr uint64_t kLongest = 3600ull * 1000;
    const uint64_t milliseconds = std::min((deadline - now) / 1000000 + 1, kLongest);
    replay::futex_wait(count_, seen, static_cast<long>(milliseconds));
  }

 private:
  std::atomic<uint32_t> count_{0};
};

struct RealPlatform {
  template <class T>
  using Atomic = std::atomic<T>;
  using Mutex = std::mutex;
  using Event = persistence::Event;
  static void pause() { replay::cpu_relax(); }
  static bool passed(uint64_t deadline) { return deadline != kNever && replay::now_ns() >= deadline; }
};

}  // namespace understudy::persistence
