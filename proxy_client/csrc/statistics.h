// Counters for the benchmark. They cost nothing unless UNDERSTUDY_STATISTICS=1.
#pragma once
#include <atomic>
#include <cstdint>

namespace understudy::client {

struct Statistics {
  std::atomic<uint64_t> calls{0}, hits{0}, misses{0}, synchronous{0}, inferred{0};
  // Time stamp counter ticks spent in the client: all of a call, encoding, lookup, making outputs, append.
  std::atomic<uint64_t> total_ticks{0}, encode_ticks{0}, lookup_ticks{0}, output_ticks{0}, append_ticks{0};
  std::atomic<uint64_t> host_to_device{0}, device_to_host{0}, allocations{0};
};

Statistics& statistics() noexcept;
bool statistics_enabled() noexcept;

namespace detail {
[[gnu::visibility("hidden")]] extern const bool statistics_on;  // within this library
}

inline uint64_t ticks() noexcept {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#endif
}

inline void count(std::atomic<uint64_t> Statistics::* counter, uint64_t amount = 1) noexcept {
  if (__builtin_expect(detail::statistics_on, 0))
    (statistics().*counter).fetch_add(amount, std::memory_order_relaxed);
}

// Splits the time of one call into stages; a no-op while statistics are off.
class StageTimer {
 public:
  StageTimer() noexcept : on_(detail::statistics_on), start_(on_ ? ticks() : 0), last_(start_) {}
  ~StageTimer() {
    if (!on_) return;
    count(&Statistics::calls);
    count(&Statistics::total_ticks, ticks() - start_);
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;
  void finish(std::atomic<uint64_t> Statistics::* stage) noexcept {
    if (!on_) return;
    const uint64_t now = ticks();
    count(stage, now - last_);
    last_ = now;
  }

 private:
  bool on_;
  uint64_t start_, last_;
};

}  // namespace understudy::client
