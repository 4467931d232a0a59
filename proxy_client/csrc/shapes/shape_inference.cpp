#include "proxy_client/csrc/shapes/shape_inference.h"

#include <ATen/ATen.h>

#include <unordered_map>

#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/statistics.h"

namespace understudy::client {
namespace {

using at::Tensor;
using c10::IValue;

c10::Storage meta_storage(size_t bytes) {
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, c10::Device(c10::kMeta)),
          c10::GetAllocator(c10::kMeta), true};
}

// Twins on the meta device; arguments that share a storage have twins that share one.
class MetaTwins {
 public:
  Tensor twin(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_meta() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
    c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) storage = meta_storage(tensor.storage().nbytes());
    Tensor copy = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    auto* impl = copy.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) copy._set_conj(true);
    if (tensor.is_neg()) copy._set_neg(true);
    if (tensor.is_cuda()) device_twins_.push_back(copy);
    return copy;
  }

  IValue twin(const IValue& value) {
    if (value.isTensor()) return twin(value.toTensor());
    if (value.isDevice()) return c10::Device(c10::kMeta);
    if (value.isGenerator()) return IValue();
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const IValue& item : value.toListRef()) list.push_back(twin(item.toTensor()));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined()) {
          list.push_back(twin(item.toTensor()));
        } else {
          list.push_back(std::nullopt);
        }
      }
      return list;
    }
    return value;
  }

  // Of the cuda arguments, in the order of device_tensors().
  const std::vector<Tensor>& device_twins() const { return device_twins_; }

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
  std::vector<Tensor> device_twins_;
};

Output describe(const Tensor& tensor, const std::vector<Tensor>& twins) {
  const size_t bytes = tensor.defined() ? bytes_needed(tensor.sizes(), tensor.strides(),
                                                       tensor.storage_offset(), tensor.element_size())
                                        : 0;
  return describe_output(tensor, twins, bytes);
}

std::vector<Resize> find_resizes(const std::vector<Tensor>& before, const std::vector<Tensor>& twins) {
  std::vector<Resize> resizes;
  for (size_t i = 0; i < before.size(); i++)
    if (before[i].sizes() != twins[i].sizes() || before[i].strides() != twins[i].strides())
      resizes.push_back({i, twins[i].sizes().vec(), twins[i].strides().vec(), lazy_flags(twins[i])});
  return resizes;
}

}  // namespace

bool infer_shapes(const c10::OperatorHandle& op, const OperatorInfo& info, c10::ArrayRef<IValue> arguments,
                  CallTemplate& entry) {
  if (!info.shape_kernel || info.dynamic || !info.returns_tensors) return false;
  MetaTwins twins;
  torch::jit::Stack stack;
  for (const IValue& argument : arguments) stack.push_back(twins.twin(argument));
  try {
    info.shape_kernel->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  count(&Statistics::inferred);
  entry.resizes = find_resizes(device_tensors(arguments), twins.device_twins());
  for (size_t i = 0; i < info.returns.size(); i++) {
    const auto describe_twin = [&](const Tensor& tensor) { return describe(tensor, twins.device_twins()); };
    entry.results.push_back(info.returns[i].written ? Result{} : describe_result(stack[i], describe_twin));
  }
  summarise(entry);
  return true;
}

}  // namespace understudy::client
