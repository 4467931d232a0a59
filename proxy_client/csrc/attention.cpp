#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <tuple>

#include "proxy_client/csrc/device.h"

// Scaled dot product attention is PyTorch's own composite, which asks a stub of the device which kernel to
// take, once its arguments are checked, and makes boolean masks additive. Two answers are ours: what the
// driver says, and, if that is a CPU's fused kernel, a name by which PyTorch calls a device's own.
namespace understudy::client {
namespace {

using at::Tensor;
using c10::SymInt;

constexpr int64_t kFlash = 1, kDevicesOwn = 4;  // at::SDPBackend::flash_attention, overrideable

// A CPU tensor of the same shape with no memory behind it: the choice looks only at metadata. What is asked
// of may be a wrapper (vmap) that has no storage.
Tensor host_twin(const Tensor& tensor) {
  const size_t bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
                       nullptr, false);
  Tensor twin = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  twin.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return twin.set_requires_grad(tensor.requires_grad());
}

// What a CUDA build has here would look at the worker's own GPU. On GPUs the operator asks the driver, once
// for each shape.
int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
               double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (!driver_is_cpu())
    return at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  std::optional<Tensor> mask_twin;
  if (mask && mask->defined()) mask_twin = host_twin(*mask);
  const int64_t choice = at::_fused_sdp_choice(host_twin(query), host_twin(key), host_twin(value), mask_twin,
                                               dropout, is_causal, scale, enable_gqa);
  return choice == kFlash ? kDevicesOwn : choice;
}

struct ChoiceRegistration {
  ChoiceRegistration() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose); }
} const choice_registration;

// The second half of the result is for backward kernels of GPUs: the CPU's has its own gradient.
std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor> fused_on_cpu(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    double dropout, bool is_causal, bool, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale);
  return {output, logsumexp, {}, {}, query.sym_size(-2), key.sym_size(-2), {}, {}, {}};
}

}  // namespace

// Under vmap, too, it is no more than another name.
#define UNDERSTUDY_DEVICES_OWN(KEY)                                                           \
  TORCH_LIBRARY_IMPL(aten, KEY, library) {                                                    \
    library.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(fused_on_cpu)); \
  }
UNDERSTUDY_DEVICES_OWN(PrivateUse1)
UNDERSTUDY_DEVICES_OWN(AutogradPrivateUse1)
UNDERSTUDY_DEVICES_OWN(FuncTorchBatched)
#undef UNDERSTUDY_DEVICES_OWN

}  // namespace understudy::client
