// Tensors that say `cuda` and dispatch to us.
#pragma once
#include <ATen/core/Tensor.h>

namespace understudy::client {

// PrivateUse1 comes first, so existing CUDA kernels are never selected; the CUDA bit keeps cpu and cuda
// tensors "shallow copy compatible" (`.to("cuda")` of Parameters); autocast knows the tensors as CUDA's.
inline constexpr c10::DispatchKeySet kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) |
                                             c10::DispatchKeySet(c10::DispatchKey::CUDA) |
                                             c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA);

// Layout of one tensor in its storage, in elements.
struct Layout {
  c10::ScalarType dtype{};
  int64_t offset = 0;
  c10::IntArrayRef sizes, strides;
};

// What a tensor's conjugation and negation bits say (replay::kConjugate, replay::kNegative), and setting
// them.
uint64_t lazy_flags(const at::Tensor& tensor);
void set_lazy_flags(const at::Tensor& tensor, uint64_t flags);

at::Tensor make_tensor(c10::Storage storage, const Layout& layout);
// A storage for a buffer that a record in the log creates.
c10::Storage make_storage(size_t bytes, c10::DeviceIndex device, uint64_t handle);
// A storage with its own kAllocate record.
c10::Storage allocate_storage(size_t bytes, c10::DeviceIndex device);

// Bytes that a storage must have to hold such a tensor.
size_t bytes_needed(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, size_t item_bytes);

// Same storage, other shape; the storage grows if it must (see resize_storage for `record`).
void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, bool record);

// The part of a storage that a dense tensor occupies, in bytes.
struct ByteRange {
  uint64_t handle, offset, bytes;
};
ByteRange byte_range(const at::Tensor& dense);

}  // namespace understudy::client
