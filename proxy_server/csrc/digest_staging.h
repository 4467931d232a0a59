// Digests of what lies on a GPU, through the host: exact, and bounded by one core.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <mutex>

namespace understudy::server {

// Two pieces of pinned memory: while one is hashed the next is on its way into the other. Copies into pinned
// memory take a fourth of the time of those into memory that is not, and no page has to be made for them.
class DigestStaging {
 public:
  // XXH3-64 of a tensor of bytes, which is contiguous and lies on a GPU.
  uint64_t digest(const at::Tensor& bytes);

 private:
  static constexpr int64_t kPiece = 4 << 20;
  void* half(int64_t piece) const;

  std::mutex mutex_;  // servers that stand are asked for digests by other threads
  c10::DataPtr memory_;
};

}  // namespace understudy::server
