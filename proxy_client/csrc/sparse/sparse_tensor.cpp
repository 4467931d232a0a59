#include "proxy_client/csrc/sparse/sparse_tensor.h"

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/impl/PyInterpreter.h>

#include "proxy_client/csrc/nested/nested_tensor.h"

namespace understudy::client {
namespace {

using at::Tensor;

c10::DispatchKeySet with_autograd(c10::DispatchKeySet keys, bool inference) {
  return inference ? keys
                   : keys | c10::getAutogradRelatedKeySetFromBackend(c10::BackendComponent::PrivateUse1Bit);
}

// The interpreter that a copy must go through, as in PyTorch's own classes; null for a plain copy.
c10::impl::PyInterpreter* interpreter_for(const c10::TensorImpl& tensor) {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return nullptr;
  if (const auto depth = c10::impl::TorchDispatchModeTLS::stack_len(); depth > 0)
    return &c10::impl::TorchDispatchModeTLS::get_stack_at(depth - 1)->pyinterpreter();
  return tensor.key_set().has(c10::DispatchKey::Python) ? c10::impl::getGlobalPyInterpreter() : nullptr;
}

// PyTorch's classes take device and key from each other and make empty members on that device, each a record
// in the log. Ours are born on the CPU and moved before anyone sees them; copies are made here for the same
// reason. `Copy` and the base class's own fields are all that differ between the two.
template <class Base>
class OnDevice : public Base {
 public:
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow_metadata_change) const override {
    return detach(version, allow_metadata_change);
  }
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                              bool allow_metadata_change) const override {
    return detach(version, allow_metadata_change);
  }

 protected:
  using Base::Base;
  void move_to_device(c10::DispatchKeySet keys, c10::Device device) {
    this->key_set_ = with_autograd(keys, this->is_inference());
    this->device_opt_ = device;
  }
  virtual c10::intrusive_ptr<c10::TensorImpl> copy(const c10::VariableVersion& version,
                                                   bool allow_metadata_change) const = 0;

 private:
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::VariableVersion& version,
                                             bool allow_metadata_change) const {
    if (const auto* interpreter = interpreter_for(*this)) {
      auto copied = (*interpreter)->detach(this);
      copied->set_version_counter(version);
      copied->set_allow_tensor_metadata_change(allow_metadata_change);
      return copied;
    }
    return copy(version, allow_metadata_change);
  }
};

class DeviceSparse final : public OnDevice<at::SparseTensorImpl> {
 public:
  DeviceSparse(caffe2::TypeMeta type, c10::Device device)
      : OnDevice(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), type) {
    move_to_device(kSparseKeys, device);
  }
  void take_pieces(const at::SparseTensorImpl& from) {
    indices_ = from.indices_;
    values_ = from.values_;
    sparse_dim_ = from.sparse_dim_;
    dense_dim_ = from.dense_dim_;
    coalesced_ = from.coalesced_;
  }

 protected:
  c10::intrusive_ptr<c10::TensorImpl> copy(const c10::VariableVersion& version,
                                           bool allow_metadata_change) const override {
    auto copied = c10::make_intrusive<DeviceSparse>(dtype(), device());
    TensorImpl::copy_tensor_metadata(this, copied.get(), version, allow_metadata_change);
    copied->take_pieces(*this);
    copied->refresh_numel();
    return copied;
  }
};

class DeviceSparseCompressed final : public OnDevice<at::SparseCsrTensorImpl> {
 public:
  DeviceSparseCompressed(c10::Layout layout, caffe2::TypeMeta type, c10::Device device)
      : OnDevice(c10::DispatchKeySet(c10::DispatchKey::SparseCsrCPU), c10::Device(c10::kCPU), layout, type) {
    move_to_device(kSparseCompressedKeys, device);
  }

 protected:
  c10::intrusive_ptr<c10::TensorImpl> copy(const c10::VariableVersion& version,
                                           bool allow_metadata_change) const override {
    auto copied = c10::make_intrusive<DeviceSparseCompressed>(layout_, dtype(), device());
    TensorImpl::copy_tensor_metadata(this, copied.get(), version, allow_metadata_change);
    copied->crow_indices_ = crow_indices_;
    copied->col_indices_ = col_indices_;
    copied->values_ = values_;
    copied->layout_ = layout_;
    copied->refresh_numel();
    return copied;
  }
};

// What a sparse tensor consists of carries no autograd history of its own.
Tensor without_history(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
}

at::SparseTensorImpl& coo(const Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}
at::SparseCsrTensorImpl& compressed(const Tensor& tensor) {
  return *static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

bool is_compressed(c10::Layout layout) {
  return layout == at::kSparseCsr || layout == at::kSparseCsc || layout == at::kSparseBsr ||
         layout == at::kSparseBsc;
}

void check_known(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_sparse() || is_compressed(tensor.layout()), "tensors of layout ",
                              tensor.layout(),
                              " are not supported on the virtual device; use a strided tensor");
}

}  // namespace

Tensor make_sparse(int64_t sparse_dim, c10::IntArrayRef sizes, const Tensor& indices, const Tensor& values,
                   std::optional<bool> coalesced) {
  auto impl = c10::make_intrusive<DeviceSparse>(values.dtype(), values.device());
  impl->raw_resize_(sparse_dim, static_cast<int64_t>(sizes.size()) - sparse_dim, sizes);
  impl->set_indices_and_values_unsafe(without_history(indices), without_history(values));
  if (coalesced) impl->set_coalesced(*coalesced);
  return Tensor(std::move(impl));
}

Tensor make_sparse_compressed(c10::Layout layout, c10::IntArrayRef sizes, const Tensor& compressed_indices,
                              const Tensor& plain_indices, const Tensor& values) {
  auto impl = c10::make_intrusive<DeviceSparseCompressed>(layout, values.dtype(), values.device());
  impl->set_member_tensors(without_history(compressed_indices), without_history(plain_indices),
                           without_history(values), sizes);
  return Tensor(std::move(impl));
}

std::vector<Tensor> pieces(const Tensor& composite) {
  if (composite.is_nested()) return {buffer_of_nested(composite)};
  check_known(composite);
  if (composite.is_sparse()) return {coo(composite).indices_, coo(composite).values_};
  const auto& impl = compressed(composite);
  return {impl.crow_indices_, impl.col_indices_, impl.values_};
}

void assign_composite(const Tensor& to, const Tensor& from) {
  if (to.is_nested()) return;  // no operator changes more than the content of its buffer
  TORCH_CHECK(to.layout() == from.layout(), "the device server returned a tensor of layout ", from.layout(),
              " for one of layout ", to.layout());
  if (to.is_sparse()) {
    auto &mine = coo(to), &theirs = coo(from);
    mine.indices_ = theirs.indices_;
    mine.values_ = theirs.values_;
    mine.sparse_dim_ = theirs.sparse_dim_;
    mine.dense_dim_ = theirs.dense_dim_;
    mine.coalesced_ = theirs.coalesced_;
    if (to.sizes() == from.sizes()) return;
    mine.set_sizes_and_strides(from.sizes(), std::vector<int64_t>(from.sizes().size()));
    mine.refresh_numel();
  } else {
    auto &mine = compressed(to), &theirs = compressed(from);
    mine.set_member_tensors(theirs.crow_indices_, theirs.col_indices_, theirs.values_, from.sizes());
  }
}

}  // namespace understudy::client
