// A bounded queue of small numbers (free slots, free chunks) for many producers and consumers, without locks
// (after D. Vyukov's).  Each cell carries the turn it is in: `position` when it may be filled, `position + 1`
// when it may be emptied. `Platform` says what an atomic is: tests put one in its place that lets them try
// every interleaving.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace understudy::persistence {

template <class Platform>
class IndexRing {
 public:
  explicit IndexRing(uint32_t most)
      : mask_(std::bit_ceil(uint64_t{most < 2 ? 2 : most}) - 1), cells_(std::make_unique<Cell[]>(mask_ + 1)) {
    for (uint64_t i = 0; i <= mask_; i++) cells_[i].turn.store(i, std::memory_order_relaxed);
  }

  // Precondition: fewer than `most` are in it.  One more was put in twice, or never taken out.
  void push(uint32_t value) {
    uint64_t at = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const auto ahead = static_cast<int64_t>(cell.turn.load(std::memory_order_acquire) - at);
      if (ahead == 0) {
        if (!tail_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;
        cell.value = value;
        cell.turn.store(at + 1, std::memory_order_release);
        return;
      }
      if (ahead < 0) {
        if (static_cast<int64_t>(at - head_.load(std::memory_order_relaxed)) > static_cast<int64_t>(mask_))
          throw std::logic_error("more numbers came back to a ring than it gave out");
        Platform::pause();  // a consumer has claimed this cell a round ago, and is about to leave it
      }
      at = tail_.load(std::memory_order_relaxed);
    }
  }

  // False: empty, or its first number is being put in at this moment (whoever does that says so afterwards).
  bool pop(uint32_t& value) {
    uint64_t at = head_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const auto ahead = static_cast<int64_t>(cell.turn.load(std::memory_order_acquire) - (at + 1));
      if (ahead == 0) {
        if (!head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;
        value = cell.value;
        cell.turn.store(at + mask_ + 1, std::memory_order_release);
        return true;
      }
      if (ahead < 0) return false;
      at = head_.load(std::memory_order_relaxed);
    }
  }

  // A moment's view.
  uint32_t size() const {
    const uint64_t head = head_.load(std::memory_order_acquire);
    const uint64_t tail = tail_.load(std::memory_order_acquire);
    return tail > head ? static_cast<uint32_t>(tail - head) : 0;
  }

 private:
  struct Cell {
    typename Platform::template Atomic<uint64_t> turn{0};
    uint32_t value = 0;
  };

  const uint64_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  typename Platform::template Atomic<uint64_t> head_{0};
  typename Platform::template Atomic<uint64_t> tail_{0};
};

}  // namespace understudy::persistence
