// A lock that is held for a few instructions: two atomic operations, inline, while nobody else wants it.
#pragma once
#include "replay/csrc/log/futex.h"

namespace understudy::replay {

class QuickLock {
 public:
  QuickLock() = default;
  QuickLock(const QuickLock&) = delete;
  QuickLock& operator=(const QuickLock&) = delete;

  void lock() noexcept {
    uint32_t free = kFree;
    if (__builtin_expect(!state_.compare_exchange_strong(free, kHeld, std::memory_order_acquire), 0)) wait();
  }
  void unlock() noexcept {
    if (__builtin_expect(state_.exchange(kFree, std::memory_order_release) == kAwaited, 0))
      futex_wake(state_);
  }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1, kAwaited = 2;
  static constexpr long kLongestSleepMs = 1000;
  // Whoever waited holds it as "awaited": there may be others, and a needless wake-up is harmless.
  [[gnu::noinline]] void wait() noexcept {
    while (state_.exchange(kAwaited, std::memory_order_acquire) != kFree)
      futex_wait(state_, kAwaited, kLongestSleepMs);
  }
  std::atomic<uint32_t> state_{kFree};
};

}  // namespace understudy::replay
