#include "proxy_client/csrc/sparse/sparse_kernels.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/sparse/sparse_tensor.h"

namespace understudy::client {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalDtype = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;

at::TensorOptions dense_options(OptionalDtype dtype, OptionalDevice device) {
  return at::TensorOptions()
      .dtype(c10::dtype_or_default(dtype))
      .device(resolve_device(device ? *device : c10::Device(c10::kCUDA)));
}

void check_not_pinned(std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

// PyTorch's functions check layouts and shapes, but what they make has the key of a CUDA tensor only.
Tensor as_ours(const Tensor& made) {
  const std::vector<Tensor> parts = pieces(made);
  return make_sparse_compressed(made.layout(), made.sizes(), parts[0], parts[1], parts[2]);
}

}  // namespace

Tensor sparse_with_dims(int64_t sparse_dim, int64_t dense_dim, IntArrayRef size, OptionalDtype dtype,
                        OptionalLayout, OptionalDevice device, std::optional<bool> pinned) {
  check_not_pinned(pinned);
  TORCH_CHECK(sparse_dim + dense_dim == static_cast<int64_t>(size.size()),
              "'len(size) == sparse_dim + dense_dim' is not satisfied: len(size) = ", size.size(),
              ", sparse_dim = ", sparse_dim, ", dense_dim = ", dense_dim);
  const at::TensorOptions options = dense_options(dtype, device);
  c10::DimVector values_size{0};
  values_size.append(size.begin() + sparse_dim, size.end());
  const Tensor indices = at::empty({sparse_dim, 0}, options.dtype(at::kLong));
  return make_sparse(sparse_dim, size, indices, at::empty(values_size, options), std::nullopt);
}

Tensor empty_sparse(IntArrayRef size, OptionalDtype dtype, OptionalLayout layout, OptionalDevice device,
                    std::optional<bool> pinned, std::optional<at::MemoryFormat>) {
  return sparse_with_dims(static_cast<int64_t>(size.size()), 0, size, dtype, layout, device, pinned);
}

Tensor sparse_with_tensors(int64_t sparse_dim, int64_t dense_dim, IntArrayRef size, const Tensor& indices,
                           const Tensor& values, OptionalDtype, OptionalLayout, OptionalDevice,
                           std::optional<bool> pinned, std::optional<bool> coalesced) {
  check_not_pinned(pinned);
  TORCH_CHECK(sparse_dim + dense_dim == static_cast<int64_t>(size.size()),
              "'len(size) == sparse_dim + dense_dim' is not satisfied: len(size) = ", size.size(),
              ", sparse_dim = ", sparse_dim, ", dense_dim = ", dense_dim);
  return make_sparse(sparse_dim, size, indices, values, coalesced);
}

Tensor clone_composite(const Tensor& self, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Preserve || !self.is_sparse(),
              "unsupported memory format option ", *format);
  std::vector<Tensor> copies;
  for (const Tensor& piece : pieces(self)) copies.push_back(piece.clone());
  if (self.is_sparse())
    return make_sparse(self.sparse_dim(), self.sizes(), copies[0], copies[1], self.is_coalesced());
  return make_sparse_compressed(self.layout(), self.sizes(), copies[0], copies[1], copies[2]);
}

Tensor sparse_compressed_unchecked(const Tensor& compressed_indices, const Tensor& plain_indices,
                                   const Tensor& values, IntArrayRef size, OptionalDtype dtype,
                                   OptionalLayout layout, OptionalDevice device, std::optional<bool> pinned) {
  check_not_pinned(pinned);
  return as_ours(at::native::_sparse_compressed_tensor_unsafe_symint(compressed_indices, plain_indices,
                                                                     values, c10::fromIntArrayRefSlow(size),
                                                                     dtype, layout, device, pinned));
}

Tensor sparse_compressed_checked(const Tensor& compressed_indices, const Tensor& plain_indices,
                                 const Tensor& values, IntArrayRef size, OptionalDtype dtype,
                                 OptionalLayout layout, OptionalDevice device, std::optional<bool> pinned) {
  check_not_pinned(pinned);
  return as_ours(at::native::sparse_compressed_tensor(compressed_indices, plain_indices, values, size, dtype,
                                                      layout, device, pinned));
}

Tensor empty_sparse_compressed(IntArrayRef size, OptionalDtype dtype, OptionalLayout layout,
                               OptionalDevice device, std::optional<bool> pinned,
                               std::optional<at::MemoryFormat> format) {
  return as_ours(at::native::empty_sparse_compressed(size, dtype, layout, device, pinned, format));
}

}  // namespace understudy::client
