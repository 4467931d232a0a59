// Operators that touch only metadata: they run in the worker and leave no record (but for memory).
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>

#include <optional>

namespace understudy::client {

using OptionalDtype = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;
using OptionalFormat = std::optional<at::MemoryFormat>;

at::Tensor empty_memory_format(at::IntArrayRef size, OptionalDtype dtype, OptionalLayout layout,
                               OptionalDevice device, std::optional<bool> pinned, OptionalFormat format);
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, OptionalDtype dtype,
                         OptionalLayout layout, OptionalDevice device, std::optional<bool> pinned);
// Autograd's tensors of zeros without memory would mean nothing to another process: real zeros instead.
at::Tensor efficient_zero_tensor(at::IntArrayRef size, OptionalDtype dtype, OptionalLayout layout,
                                 OptionalDevice device, std::optional<bool> pinned);

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, OptionalFormat format);
// UntypedStorage.resize_
void resize_untyped_storage(const at::Tensor& view_of_storage, int64_t bytes);

at::Tensor& set_storage_with_offset(at::Tensor& self, at::Storage source, int64_t offset,
                                    at::IntArrayRef size, at::IntArrayRef stride);
at::Tensor& set_storage(at::Tensor& self, at::Storage source);
at::Tensor& set_empty(at::Tensor& self);

at::Tensor view(const at::Tensor& self, at::IntArrayRef size);
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset);
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride);
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step);
at::Tensor view_as_real(const at::Tensor& self);
at::Tensor view_as_complex(const at::Tensor& self);
void record_stream(at::Tensor& self, at::Stream stream);

}  // namespace understudy::client
