// Nested tensors of layout strided: PyTorch's own class over one dense buffer of ours. (Jagged ones are
// Python over dense tensors and need nothing here.)
#pragma once
#include <ATen/core/Tensor.h>

#include "proxy_client/csrc/call/word_buffer.h"

namespace understudy::client {

// What a nested tensor is besides its buffer: `components` rows of int64.
struct NestedShape {
  at::Tensor sizes, strides, offsets;  // on the CPU: [components, dims] twice, [components]
  int64_t components() const { return sizes.size(0); }
  int64_t dims() const { return sizes.size(1); }
};

// The whole memory of a nested tensor, as a vector.
at::Tensor buffer_of_nested(const at::Tensor& nested);
NestedShape shape_of_nested(const at::Tensor& nested);
// `buffer` is shared, not copied.
at::Tensor make_nested(const at::Tensor& buffer, const NestedShape& shape);

// The shape as words: sizes, strides, offsets, row by row.
void append_nested_shape(const NestedShape& shape, WordBuffer& words);
// From such words, of which there must be components * (2 * dims + 1).
NestedShape read_nested_shape(const uint64_t* words, int64_t components, int64_t dims);

}  // namespace understudy::client
