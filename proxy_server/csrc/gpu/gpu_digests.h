// Digests of contents that lie on a GPU, made there: 0.2 % of the bytes come to the host.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "replay/csrc/digest/piece_keys.h"

namespace understudy::server {

struct CudaDriver;  // the functions of libcuda.so.1 that are needed

class GpuDigests {
 public:
  // None where the driver does not take our code, which is said once, or there is none.
  static std::unique_ptr<GpuDigests> load();

  // Of each content, in order, on the current device's default stream; waits for it. Throws c10::Error.
  std::vector<uint64_t> of(const std::vector<const c10::Storage*>& contents);

 private:
  GpuDigests(const CudaDriver& driver, void* piece_digests, void* gather);
  void run(const std::vector<const c10::Storage*>& contents, size_t begin, size_t end,
           std::vector<uint64_t>& found);
  void launch(void* function, uint64_t blocks, void** arguments) const;
  void need_room(uint64_t bytes);

  const CudaDriver& driver_;
  void *piece_digests_, *gather_;
  const replay::piece::Keys keys_ = replay::piece::keys();
  at::Tensor on_gpu_;     // rows, and what comes of them
  c10::DataPtr on_host_;  // the same, in pinned memory
  uint64_t room_ = 0;     // of each
};

}  // namespace understudy::server
