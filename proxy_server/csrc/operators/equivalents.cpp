#include "proxy_server/csrc/operators/equivalents.h"

#include <ATen/ATen.h>
#include <c10/util/Metaprogramming.h>
#include <torch/library.h>

#include <tuple>

#include "proxy_server/csrc/operators/equivalent_attention.h"

namespace understudy::server {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- synchronised batch normalisation; channels are dimension 1, statistics have one number per channel

// A tensor with one number per channel, in the shape that broadcasts over `input`.
Tensor per_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.to(accumulation_type(input)).reshape(shape);
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dimensions{0};
  for (int64_t i = 2; i < input.dim(); i++) dimensions.push_back(i);
  return dimensions;
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const Tensor x = input.to(accumulation_type(input));
  const auto dimensions = all_but_channels(x);
  const Tensor mean = x.mean(dimensions);
  const Tensor variance = (x - per_channel(mean, x)).square().mean(dimensions);
  return {mean, (variance + eps).rsqrt()};
}

// `mean` and `invstd`: a row per part of the batch; `counts`: how many numbers of a channel each part has.
std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& input, const Tensor& mean, const Tensor& invstd, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, double momentum, double eps, const Tensor& counts) {
  const auto type = accumulation_type(input);
  const Tensor count = counts.to(type).reshape({-1, 1}), total = count.sum();
  const Tensor means = mean.to(type);
  const Tensor all_mean = (means * count).sum(0) / total;
  const Tensor variances = invstd.to(type).square().reciprocal() - eps;
  const Tensor squares = ((variances + (means - all_mean).square()) * count).sum(0);
  if (running_mean && running_mean->defined()) running_mean->mul_(1 - momentum).add_(all_mean, momentum);
  if (running_var && running_var->defined())
    running_var->mul_(1 - momentum).add_(squares / (total - 1), momentum);
  return {all_mean, (squares / total + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats(const Tensor& input, const Tensor& mean,
                                                   const Tensor& invstd, const OptionalTensor& running_mean,
                                                   const OptionalTensor& running_var, double momentum,
                                                   double eps, int64_t count) {
  const Tensor counts = at::full({mean.size(0)}, count, mean.options());
  return at::batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum,
                                                 eps, counts);
}

Tensor batch_norm_elemt(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& invstd, double) {
  Tensor out = (input.to(accumulation_type(input)) - per_channel(mean, input)) * per_channel(invstd, input);
  if (weight && weight->defined()) out = out * per_channel(*weight, input);
  if (bias && bias->defined()) out = out + per_channel(*bias, input);
  return out.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, bool input_g, bool weight_g, bool bias_g) {
  const auto type = accumulation_type(input);
  const auto dimensions = all_but_channels(input);
  const Tensor dy = grad_out.to(type);
  const Tensor sum_dy = dy.sum(dimensions);
  const Tensor sum_dy_xmu = (dy * (input.to(type) - per_channel(mean, input))).sum(dimensions);
  const auto like = weight && weight->defined() ? weight->scalar_type() : type;
  return {input_g ? sum_dy : Tensor(), input_g ? sum_dy_xmu : Tensor(),
          weight_g ? (sum_dy_xmu * invstd.to(type)).to(like) : Tensor(),
          bias_g ? sum_dy.to(like, /*non_blocking=*/false, /*copy=*/true) : Tensor()};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, const OptionalTensor& weight, const Tensor& sum_dy,
                                 const Tensor& sum_dy_xmu, const Tensor& count) {
  const auto type = accumulation_type(input);
  const Tensor total = count.sum().to(type);
  const Tensor scale = per_channel(invstd, input);
  const Tensor centred = input.to(type) - per_channel(mean, input);
  const Tensor projection = per_channel(sum_dy_xmu.to(type) / total, input) * scale.square();
  Tensor out = grad_out.to(type) - per_channel(sum_dy.to(type) / total, input) - centred * projection;
  out = out * scale;
  if (weight && weight->defined()) out = out * per_channel(*weight, input);
  return out.to(input.scalar_type());
}

// ---- products whose result is wider than their factors: the factors are widened first

using at::ScalarType;
using c10::Scalar;

Tensor mm_wide(const Tensor& self, const Tensor& mat2, ScalarType type) {
  return at::mm(self.to(type), mat2.to(type));
}
Tensor& mm_wide_out(const Tensor& self, const Tensor& mat2, ScalarType type, Tensor& out) {
  return at::mm_out(out, self.to(type), mat2.to(type));
}
Tensor bmm_wide(const Tensor& self, const Tensor& mat2, ScalarType type) {
  return at::bmm(self.to(type), mat2.to(type));
}
Tensor& bmm_wide_out(const Tensor& self, const Tensor& mat2, ScalarType type, Tensor& out) {
  return at::bmm_out(out, self.to(type), mat2.to(type));
}
Tensor addmm_wide(const Tensor& self, const Tensor& mat1, const Tensor& mat2, ScalarType type,
                  const Scalar& beta, const Scalar& alpha) {
  return at::addmm(self.to(type), mat1.to(type), mat2.to(type), beta, alpha);
}
Tensor& addmm_wide_out(const Tensor& self, const Tensor& mat1, const Tensor& mat2, ScalarType type,
                       const Scalar& beta, const Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, self.to(type), mat1.to(type), mat2.to(type), beta, alpha);
}
Tensor baddbmm_wide(const Tensor& self, const Tensor& batch1, const Tensor& batch2, ScalarType type,
                    const Scalar& beta, const Scalar& alpha) {
  return at::baddbmm(self.to(type), batch1.to(type), batch2.to(type), beta, alpha);
}
Tensor& baddbmm_wide_out(const Tensor& self, const Tensor& batch1, const Tensor& batch2, ScalarType type,
                         const Scalar& beta, const Scalar& alpha, Tensor& out) {
  return at::baddbmm_out(out, self.to(type), batch1.to(type), batch2.to(type), beta, alpha);
}

// ---- the table

struct Equivalent {
  template <class Function>
  Equivalent(const char* operator_name, Function kernel) : name(operator_name), function(kernel) {}
  const char* name;
  torch::CppFunction function;
};

std::vector<Equivalent> equivalents() {
  std::vector<Equivalent> table;
  table.emplace_back("batch_norm_stats", TORCH_FN(batch_norm_stats));
  table.emplace_back("batch_norm_gather_stats", TORCH_FN(batch_norm_gather_stats));
  table.emplace_back("batch_norm_gather_stats_with_counts", TORCH_FN(batch_norm_gather_stats_with_counts));
  table.emplace_back("batch_norm_elemt", TORCH_FN(batch_norm_elemt));
  table.emplace_back("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
  table.emplace_back("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
  table.emplace_back("mm.dtype", TORCH_FN(mm_wide));
  table.emplace_back("mm.dtype_out", TORCH_FN(mm_wide_out));
  table.emplace_back("bmm.dtype", TORCH_FN(bmm_wide));
  table.emplace_back("bmm.dtype_out", TORCH_FN(bmm_wide_out));
  table.emplace_back("addmm.dtype", TORCH_FN(addmm_wide));
  table.emplace_back("addmm.dtype_out", TORCH_FN(addmm_wide_out));
  table.emplace_back("baddbmm.dtype", TORCH_FN(baddbmm_wide));
  table.emplace_back("baddbmm.dtype_out", TORCH_FN(baddbmm_wide_out));
  using FlashForward = c10::guts::infer_function_traits_t<at::_ops::_flash_attention_forward::schema>;
  if constexpr (FlashForward::number_of_parameters == 17)
    table.emplace_back("_flash_attention_forward", TORCH_FN(attention::flash_forward));
  else
    table.emplace_back("_flash_attention_forward", TORCH_FN(attention::flash_forward_unpaged));
  table.emplace_back("_flash_attention_backward", TORCH_FN(attention::flash_backward));
  table.emplace_back("_efficient_attention_forward", TORCH_FN(attention::efficient_forward));
  table.emplace_back("_efficient_attention_backward", TORCH_FN(attention::efficient_backward));
  return table;
}

}  // namespace

std::vector<std::string> equivalent_operators() {
  std::vector<std::string> names;
  for (const Equivalent& row : equivalents()) names.emplace_back(row.name);
  return names;
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  for (Equivalent& row : equivalents()) library.impl(row.name, std::move(row.function));
}

}  // namespace understudy::server
