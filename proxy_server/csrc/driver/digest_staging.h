// Digests of what lies on a GPU: made there, or, where our code cannot run there, through the host, bounded
// by one core.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "proxy_server/csrc/driver/host_copies.h"
#include "proxy_server/csrc/gpu/gpu_digests.h"

namespace understudy::server {

// Bytes of a storage.
at::Tensor bytes_of(const c10::Storage& storage, uint64_t offset, uint64_t bytes);

class DigestStaging {
 public:
  // Digests of `contents`, in order, and copies of others in host memory, all behind one wait for the device
  // if they are not larger than some memory here.
  std::vector<uint64_t> take(const std::vector<const c10::Storage*>& contents,
                             const std::vector<HostCopy>& copies);

  // Whether digests are made on the GPU.
  bool on_gpu();

 private:
  void load();
  void copy_at_once(const HostCopy& copy) const;
  // Two pieces of pinned memory: while one is hashed the next is on its way into the other. Copies into
  // pinned memory take a fourth of the time of those into memory that is not, and no page has to be made for
  // them.
  uint64_t through_host(const c10::Storage& content);
  static constexpr int64_t kPiece = 4 << 20;
  void* half(int64_t piece) const;

  std::mutex mutex_;  // servers that stand are asked for digests by other threads
  c10::DataPtr memory_;
  bool tried_ = false;
  std::unique_ptr<GpuDigests> gpu_;
  HostCopies copies_;
};

}  // namespace understudy::server
