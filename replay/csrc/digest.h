// Content digests: XXH3-64. 0 is reserved for "none".
#pragma once
#include <cstddef>
#include <cstdint>

#include "replay/csrc/xxh3.h"

namespace understudy::replay {

inline uint64_t digest(const void* data, size_t bytes, xxh3::Width width = xxh3::chosen) {
  const uint64_t value = xxh3::of(data, bytes, width);
  return value == 0 ? 1 : value;
}

// The same of what comes in pieces.
class StreamedDigest {
 public:
  explicit StreamedDigest(xxh3::Width width = xxh3::chosen) : stream_(width) {}
  void add(const void* data, size_t bytes) { stream_.add(data, bytes); }
  uint64_t value() const {
    const uint64_t value = stream_.value();
    return value == 0 ? 1 : value;
  }

 private:
  xxh3::Stream stream_;
};

}  // namespace understudy::replay
