// Reading 8-byte words of a record or template that may be hostile: every step is checked.
#pragma once
#include <cstdint>
#include <cstring>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

class Words {
 public:
  Words(const uint64_t* begin, uint64_t count) : at_(begin), end_(begin + count) {}
  uint64_t left() const { return static_cast<uint64_t>(end_ - at_); }
  uint64_t next() {
    if (__builtin_expect(at_ == end_, 0)) fail();
    return *static_cast<const volatile uint64_t*>(at_++);  // once: a worker could change it
  }
  double next_double() {
    const uint64_t bits = next();
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
  }
  const uint64_t* take(uint64_t words) {
    if (__builtin_expect(words > left(), 0)) fail();
    const uint64_t* taken = at_;
    at_ += words;
    return taken;
  }
  // `bytes` bytes, padded to whole words.
  const uint8_t* take_bytes(uint64_t bytes) {
    if (bytes > 8 * left()) fail();
    return reinterpret_cast<const uint8_t*>(take((bytes + 7) / 8));
  }
  // A count of things of at least `words_each` words: cannot exceed what is left.
  uint64_t count(uint64_t n, uint64_t words_each = 1) const {
    if (n > left() / words_each) fail();
    return n;
  }

 private:
  [[noreturn]] static void fail() { throw LogError("a record ends before its contents do"); }
  const uint64_t* at_;
  const uint64_t* end_;
};

}  // namespace understudy::replay
