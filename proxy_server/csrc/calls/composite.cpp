#include "proxy_server/csrc/calls/composite.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include <cstring>

#include "proxy_server/csrc/calls/sparse_checks.h"

namespace understudy::server {
namespace {

using at::Tensor;
using replay::LogError;
using replay::Tag;

Tensor take_piece(bool written, Words& words, DeviceState& state, ArgumentStorages* storages) {
  const uint64_t word = words.next(), handle = words.next();
  TensorSpec spec = parse_tensor(word, words);
  spec.flags = static_cast<uint8_t>(word >> 24 & 255);
  Tensor piece = view_of(written ? state.write(handle) : state.read(handle), spec);
  if (storages != nullptr) storages->emplace_back(piece.storage().unsafeGetStorageImpl(), handle);
  return piece;
}

Tensor rebuild_sparse(const CompositeSpec& spec, const Tensor& indices, const Tensor& values, bool coalesced,
                      const Driver& driver) {
  check_coo(spec, indices, values, coalesced);
  const auto key = driver.device().is_cpu() ? c10::DispatchKey::SparseCPU : c10::DispatchKey::SparseCUDA;
  Tensor tensor = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key),
                                                                c10::scalarTypeToTypeMeta(spec.dtype));
  auto& impl = *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  impl.raw_resize_(spec.sparse_dim, static_cast<int64_t>(spec.sizes.size()) - spec.sparse_dim, spec.sizes);
  impl.set_indices_and_values_unsafe(indices, values);
  impl.set_coalesced(coalesced);
  return tensor;
}

Tensor rebuild_compressed(const CompositeSpec& spec, const Tensor& compressed, const Tensor& plain,
                          const Tensor& values, const Driver& driver) {
  check_compressed(spec, compressed, plain, values);
  const auto key =
      driver.device().is_cpu() ? c10::DispatchKey::SparseCsrCPU : c10::DispatchKey::SparseCsrCUDA;
  Tensor tensor = at::detail::make_tensor<at::SparseCsrTensorImpl>(
      c10::DispatchKeySet(key), driver.device(), spec.layout, c10::scalarTypeToTypeMeta(spec.dtype));
  static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl())
      ->set_member_tensors(compressed, plain, values, c10::IntArrayRef(spec.sizes));
  return tensor;
}

// `rows` rows of `columns` words, as a tensor of int64.
Tensor take_matrix(Words& words, uint64_t rows, uint64_t columns) {
  Tensor numbers = at::empty({static_cast<int64_t>(rows), static_cast<int64_t>(columns)}, at::kLong);
  const uint64_t* taken = words.take(rows * columns);
  if (numbers.numel() != 0) std::memcpy(numbers.mutable_data_ptr(), taken, numbers.nbytes());
  return numbers;
}

Tensor rebuild_nested(const CompositeSpec& spec, uint64_t components, const Tensor& buffer, Words& words) {
  words.count(components);
  const Tensor sizes = take_matrix(words, components, spec.nested_dim);
  const Tensor strides = take_matrix(words, components, spec.nested_dim);
  const Tensor offsets = take_matrix(words, components, 1).flatten();
  check_nested(spec, sizes, strides, offsets, buffer);
  return at::detail::make_tensor<at::native::NestedTensorImpl>(buffer, sizes, strides, offsets);
}

}  // namespace

ArgumentSpec parse_composite(uint64_t word, Words& words) {
  ArgumentSpec argument;
  argument.tag = static_cast<Tag>(word & 255);
  CompositeSpec spec;
  spec.dtype = scalar_type(word >> 8 & 255);
  if (argument.tag == Tag::kNested) {
    spec.layout = at::kStrided;
    spec.nested_dim = word >> 16 & 255;
    argument.composite = std::make_shared<const CompositeSpec>(std::move(spec));
    return argument;
  }
  spec.sizes = take_sizes(words, word >> 16 & 255);
  const uint64_t kind = word >> 24 & 255;
  if (argument.tag == Tag::kSparse) {
    if (kind > spec.sizes.size()) throw LogError("a sparse tensor has more sparse dimensions than any");
    spec.sparse_dim = static_cast<int64_t>(kind);
  } else {
    spec.layout = static_cast<c10::Layout>(kind);
    if (spec.layout != at::kSparseCsr && spec.layout != at::kSparseCsc && spec.layout != at::kSparseBsr &&
        spec.layout != at::kSparseBsc)
      throw LogError("unknown layout " + std::to_string(kind));
  }
  argument.composite = std::make_shared<const CompositeSpec>(std::move(spec));
  return argument;
}

Tensor rebuild_composite(const ArgumentSpec& argument, Words& words, DeviceState& state, const Driver& driver,
                         ArgumentStorages* storages) {
  const auto piece = [&] { return take_piece(argument.written, words, state, storages); };
  const CompositeSpec& spec = *argument.composite;
  if (argument.tag == Tag::kNested) {
    const uint64_t components = words.next();
    const Tensor buffer = piece();
    return rebuild_nested(spec, components, buffer, words);
  }
  if (argument.tag == Tag::kSparse) {
    const bool coalesced = words.next() != 0;
    const Tensor indices = piece(), values = piece();
    return rebuild_sparse(spec, indices, values, coalesced, driver);
  }
  const Tensor compressed = piece(), plain = piece(), values = piece();
  return rebuild_compressed(spec, compressed, plain, values, driver);
}

}  // namespace understudy::server
