// Operators on sparse tensors that only make or take apart the tensor object: they run in the worker, on its
// dense pieces, and never wait.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace understudy::client {

at::Tensor empty_sparse(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout> layout, std::optional<at::Device> device,
                        std::optional<bool> pinned, std::optional<at::MemoryFormat> format);
at::Tensor sparse_with_dims(int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                            std::optional<at::Device> device, std::optional<bool> pinned);
at::Tensor sparse_with_tensors(int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size,
                               const at::Tensor& indices, const at::Tensor& values,
                               std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                               std::optional<at::Device> device, std::optional<bool> pinned,
                               std::optional<bool> coalesced);
at::Tensor clone_composite(const at::Tensor& self, std::optional<at::MemoryFormat> format);

at::Tensor empty_sparse_compressed(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                                   std::optional<at::Layout> layout, std::optional<at::Device> device,
                                   std::optional<bool> pinned, std::optional<at::MemoryFormat> format);
// Where the script asked for it, checks that the parts fit together, which waits for the device.
at::Tensor sparse_compressed_checked(const at::Tensor& compressed_indices, const at::Tensor& plain_indices,
                                     const at::Tensor& values, at::IntArrayRef size,
                                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                                     std::optional<at::Device> device, std::optional<bool> pinned);
at::Tensor sparse_compressed_unchecked(const at::Tensor& compressed_indices, const at::Tensor& plain_indices,
                                       const at::Tensor& values, at::IntArrayRef size,
                                       std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                                       std::optional<at::Device> device, std::optional<bool> pinned);

}  // namespace understudy::client
