#include "proxy_client/csrc/attention.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/transformers/attention.h>

#include <limits>

#include "proxy_client/csrc/device.h"

namespace understudy::client {
namespace {

using at::Tensor;

constexpr int64_t kFlashAttention = 1;  // at::SDPBackend::flash_attention

// A CPU tensor of the same shape with no memory behind it: the choice looks only at metadata.
Tensor host_twin(const Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(nullptr, c10::Device(c10::kCPU)), nullptr, false);
  Tensor twin = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  twin.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  return twin.set_requires_grad(tensor.requires_grad());
}

std::optional<Tensor> additive_mask(const std::optional<Tensor>& mask, const Tensor& query) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  return at::zeros(mask->sizes(), query.options())
      .masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

// Which fused kernel to take is the driver's to say: the operator asks it, once for each shape. What a CUDA
// build has here would look at the worker's own GPU.
int64_t ask_the_driver(const Tensor& query, const Tensor& key, const Tensor& value,
                       const std::optional<Tensor>& mask, double dropout, bool is_causal,
                       std::optional<double> scale, bool enable_gqa) {
  return at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
}

struct ChoiceRegistration {
  ChoiceRegistration() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&ask_the_driver); }
} const choice_registration;

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const std::optional<Tensor>& mask, double dropout, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa) {
  if (!driver_is_cpu())
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale,
                                                    enable_gqa);
  std::optional<Tensor> mask_twin;
  if (mask && mask->defined()) mask_twin = host_twin(*mask);
  const int64_t choice = at::_fused_sdp_choice(host_twin(query), host_twin(key), host_twin(value), mask_twin,
                                               dropout, is_causal, scale, enable_gqa);
  if (choice == kFlashAttention)
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal,
                                                                       additive_mask(mask, query), scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal,
                                                            /*dropout_mask=*/std::nullopt, scale,
                                                            enable_gqa));
}

}  // namespace understudy::client
