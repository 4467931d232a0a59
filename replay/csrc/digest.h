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

}  // namespace understudy::replay
