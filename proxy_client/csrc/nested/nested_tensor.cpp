#include "proxy_client/csrc/nested/nested_tensor.h"

#include <ATen/ATen.h>
#include <ATen/NestedTensorImpl.h>

#include <cstring>

namespace understudy::client {
namespace {

using at::Tensor;

void append(const Tensor& numbers, WordBuffer& words) {
  const Tensor plain = numbers.contiguous();
  if (plain.numel() != 0) words.push_bytes(plain.const_data_ptr(), plain.nbytes());
}

Tensor take(const uint64_t*& words, at::IntArrayRef sizes) {
  Tensor numbers = at::empty(sizes, at::TensorOptions().dtype(at::kLong));
  if (numbers.numel() != 0) std::memcpy(numbers.mutable_data_ptr(), words, numbers.nbytes());
  words += numbers.numel();
  return numbers;
}

}  // namespace

Tensor buffer_of_nested(const Tensor& nested) {
  return at::native::get_nested_tensor_impl(nested)->get_unsafe_storage_as_tensor();
}

NestedShape shape_of_nested(const Tensor& nested) {
  const auto* impl = at::native::get_nested_tensor_impl(nested);
  TORCH_CHECK_NOT_IMPLEMENTED(
      impl->get_nested_sizes().dim() == 2,
      "a nested tensor without components is not supported on the virtual device; make it on the CPU");
  return {impl->get_nested_sizes(), impl->get_nested_strides(), impl->get_storage_offsets()};
}

Tensor make_nested(const Tensor& buffer, const NestedShape& shape) {
  return at::detail::make_tensor<at::native::NestedTensorImpl>(buffer, shape.sizes, shape.strides,
                                                               shape.offsets);
}

void append_nested_shape(const NestedShape& shape, WordBuffer& words) {
  append(shape.sizes, words);
  append(shape.strides, words);
  append(shape.offsets, words);
}

NestedShape read_nested_shape(const uint64_t* words, int64_t components, int64_t dims) {
  NestedShape shape;
  shape.sizes = take(words, {components, dims});
  shape.strides = take(words, {components, dims});
  shape.offsets = take(words, {components});
  return shape;
}

}  // namespace understudy::client
