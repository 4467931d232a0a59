// Scaled dot product attention takes a CUDA branch in the worker, for which a CPU driver has no kernel:
// choose as the driver would.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace understudy::client {

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const std::optional<at::Tensor>& mask,
                                        double dropout, bool is_causal, std::optional<double> scale,
                                        bool enable_gqa);

}  // namespace understudy::client
