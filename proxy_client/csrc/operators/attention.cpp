#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <tuple>

#include "proxy_client/csrc/device/device.h"

// Scaled dot product attention is PyTorch's own composite, which asks a stub of the device which kernel to
// take, once its arguments are checked, and makes boolean masks additive. Two answers are ours: what the
// driver says, and, if that is a CPU's fused kernel, a name by which PyTorch calls a device's own.
namespace understudy::client {
namespace {

using at::Tensor;
using c10::SymInt;

constexpr int64_t kMath = 0, kFlash = 1, kDevicesOwn = 4;  // of at::SDPBackend

// As PyTorch decides for a CPU, but for whether the user allows it: a script names kernels that CUDA has.
bool suits_the_cpus_kernel(const sdp::sdp_params& asked) {
  constexpr bool kQuietly = false;
  const SymInt width = asked.query.sym_size(-1);
  return sdp::check_nested_tensor(asked, kQuietly) && sdp::check_for_dropout(asked, kQuietly) &&
         sdp::check_tensor_shapes(asked, kQuietly) &&
         sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true>(asked, kQuietly) &&
         sdp::check_attn_mask_shape(asked, kQuietly) && asked.key.sym_size(-1) == width &&
         asked.value.sym_size(-1) == width && sdp::check_nonzero_sequence_lengths_dense(asked, kQuietly) &&
         sdp::check_last_dim_stride_equals_1_dense</*ignore_singleton_dim=*/false>(asked, kQuietly) &&
         at::isFloatingType(asked.query.scalar_type());
}

// What a CUDA build has here would look at the worker's own GPU. Of a CPU only metadata matter, also those of
// fake tensors and of wrappers (vmap). On GPUs the operator asks the driver, once for each shape; fake
// tensors it would bring back here: they take the kernel that every device has.
int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
               double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (!driver_is_cpu())
    return query.key_set().has(c10::DispatchKey::PrivateUse1)
               ? at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, enable_gqa)
               : kMath;
  const at::Context& allowed = at::globalContext();
  const bool other_kernels = allowed.userEnabledMemEfficientSDP() || allowed.userEnabledCuDNNSDP();
  if (!allowed.userEnabledMathSDP() && (allowed.userEnabledFlashSDP() ? dropout > 0 : other_kernels))
    return suits_the_cpus_kernel({query, key, value, mask, dropout, is_causal, enable_gqa}) ? kDevicesOwn
                                                                                            : kMath;
  const int64_t choice =
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
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

// Under vmap and of fake tensors (AutogradCUDA), too, it is no more than another name.
#define UNDERSTUDY_DEVICES_OWN(KEY)                                                           \
  TORCH_LIBRARY_IMPL(aten, KEY, library) {                                                    \
    library.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(fused_on_cpu)); \
  }
UNDERSTUDY_DEVICES_OWN(PrivateUse1)
UNDERSTUDY_DEVICES_OWN(AutogradPrivateUse1)
UNDERSTUDY_DEVICES_OWN(AutogradCUDA)
UNDERSTUDY_DEVICES_OWN(FuncTorchBatched)
#undef UNDERSTUDY_DEVICES_OWN

}  // namespace understudy::client
