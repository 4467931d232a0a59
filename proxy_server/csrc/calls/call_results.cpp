#include "proxy_server/csrc/calls/call_results.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include <algorithm>
#include <cstring>

namespace understudy::server {

using at::Tensor;
using replay::Tag;

void CallResults::add(const c10::IValue& value) {
  words_[0]++;
  if (value.isTensor()) {
    put(value.toTensor());
  } else if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    words_.push_back(static_cast<uint64_t>(Tag::kTensorList) | list.size() << 8);
    for (const Tensor& tensor : list) put(tensor);
  } else if (value.isInt()) {
    words_.push_back(static_cast<uint64_t>(Tag::kInt));
    words_.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    words_.push_back(static_cast<uint64_t>(Tag::kBool) | static_cast<uint64_t>(value.toBool()) << 8);
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    words_.push_back(static_cast<uint64_t>(Tag::kDouble));
    words_.push_back(bits);
  } else {
    words_.push_back(static_cast<uint64_t>(Tag::kNone));
  }
}

void CallResults::put(const Tensor& tensor) {
  if (!tensor.defined()) {
    words_.push_back(static_cast<uint64_t>(Tag::kUndefined));
  } else if (tensor.is_nested()) {
    put_nested(tensor);
  } else if (tensor.layout() == at::kStrided) {
    put_dense(tensor);
  } else {
    put_composite(tensor);
  }
}

// Header and sizes as in a template, then the pieces as dense results.
void CallResults::put_composite(const Tensor& tensor) {
  const auto header = [&](Tag tag, uint64_t kind) {
    words_.push_back(static_cast<uint64_t>(tag) | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
                     static_cast<uint64_t>(tensor.dim()) << 16 | kind << 24);
    for (const int64_t size : tensor.sizes()) words_.push_back(static_cast<uint64_t>(size));
  };
  if (tensor.is_sparse()) {
    const auto& impl = *static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    header(Tag::kSparse, static_cast<uint64_t>(impl.sparse_dim()));
    words_.push_back(impl.coalesced() ? 1 : 0);
    put_dense(impl.indices());
    put_dense(impl.values().resolve_conj().resolve_neg());
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() != at::kMkldnn, "tensors of layout ", tensor.layout(),
                              " are not supported on the virtual device; use a strided tensor");
  const auto& impl = *static_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
  header(Tag::kSparseCompressed, static_cast<uint64_t>(tensor.layout()));
  put_dense(impl.compressed_indices());
  put_dense(impl.plain_indices());
  put_dense(impl.values().resolve_conj().resolve_neg());
}

// As the values of an argument, with the number of dimensions in front.
void CallResults::put_nested(const Tensor& tensor) {
  const auto& impl = *at::native::get_nested_tensor_impl(tensor);
  const Tensor& sizes = impl.get_nested_sizes();
  TORCH_CHECK_NOT_IMPLEMENTED(sizes.dim() == 2, "a nested tensor without components is not supported on the ",
                              "virtual device; make it on the CPU");
  words_.push_back(static_cast<uint64_t>(Tag::kNested) | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
                   static_cast<uint64_t>(sizes.size(1)) << 16);
  words_.push_back(static_cast<uint64_t>(sizes.size(0)));
  put_dense(impl.get_unsafe_storage_as_tensor().resolve_conj().resolve_neg());
  for (const Tensor& numbers : {sizes, impl.get_nested_strides(), impl.get_storage_offsets()}) {
    const Tensor plain = numbers.contiguous();
    const auto* first = reinterpret_cast<const uint64_t*>(plain.const_data_ptr<int64_t>());
    words_.insert(words_.end(), first, first + plain.numel());
  }
}

void CallResults::put_dense(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.is_quantized(),
      "quantized tensors are not supported on the virtual device; keep them on the CPU");
  Tensor plain = tensor;
  uint64_t handle = 0;
  for (const auto& [storage, known] : known_)
    if (storage == plain.storage().unsafeGetStorageImpl()) handle = known;
  const bool fresh = handle == 0;
  if (fresh) {
    const void* storage = plain.storage().unsafeGetStorageImpl();
    if (std::find(given_.begin(), given_.end(), storage) != given_.end()) {
      plain = plain.clone();
      storage = plain.storage().unsafeGetStorageImpl();
    }
    given_.push_back(storage);
    handle = next_++;
    state_.create(handle, plain.storage());
  }
  const uint64_t flags = (fresh ? replay::kFresh : 0) | (plain.is_conj() ? replay::kConjugate : 0) |
                         (plain.is_neg() ? replay::kNegative : 0);
  words_.push_back(static_cast<uint64_t>(Tag::kTensor) | static_cast<uint64_t>(plain.scalar_type()) << 8 |
                   static_cast<uint64_t>(plain.dim()) << 16 | flags << 24);
  words_.push_back(handle);
  words_.push_back(static_cast<uint64_t>(plain.storage_offset()));
  words_.push_back(plain.storage().nbytes());
  for (const int64_t size : plain.sizes()) words_.push_back(static_cast<uint64_t>(size));
  for (const int64_t stride : plain.strides()) words_.push_back(static_cast<uint64_t>(stride));
}

}  // namespace understudy::server
