// Content digests: XXH3-64 (third_party/xxhash). 0 is reserved for "none".
#pragma once
#define XXH_INLINE_ALL
#include <cstddef>
#include <cstdint>

#include "third_party/xxhash/xxhash.h"

namespace understudy::replay {

inline uint64_t digest(const void* data, size_t bytes) {
  const uint64_t value = XXH3_64bits(data, bytes);
  return value == 0 ? 1 : value;
}

// The same of what comes in pieces.
class StreamedDigest {
 public:
  StreamedDigest() { XXH3_64bits_reset(&state_); }
  void add(const void* data, size_t bytes) { XXH3_64bits_update(&state_, data, bytes); }
  uint64_t value() const {
    const uint64_t value = XXH3_64bits_digest(&state_);
    return value == 0 ? 1 : value;
  }

 private:
  XXH3_state_t state_;
};

}  // namespace understudy::replay
