#include "tests/csrc/simulated_cuda/host_views.h"

#include <ATen/EmptyTensor.h>

#include "tests/csrc/simulated_cuda/runtime.h"

namespace understudy::simulated {

Form form_of(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided,
                              "the simulated CUDA device has no sparse tensors");
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
          tensor.scalar_type(), tensor.is_conj(),       tensor.is_neg()};
}

at::Tensor with_form(c10::Storage storage, c10::DispatchKey key, const Form& form) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(form.type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes, form.strides, form.offset);
  if (form.conjugated) tensor._set_conj(true);
  if (form.negated) tensor._set_neg(true);
  return tensor;
}

c10::Storage host_view(const c10::Storage& storage) {
  const int device = storage.device().index();
  void* const at = memory(device).for_kernels(storage.data());
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(at, c10::Device(c10::kCPU)),
          nullptr,
          /*resizable=*/false};
}

at::Tensor host_view(const at::Tensor& tensor) {
  at::Tensor view = with_form(host_view(tensor.storage()), c10::DispatchKey::CPU, form_of(tensor));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

c10::Storage device_storage(uint64_t bytes) {
  return {c10::Storage::use_byte_size_t(), bytes, allocator()->allocate(bytes), allocator(),
          /*resizable=*/true};
}

}  // namespace understudy::simulated
