// Random operators whose numbers PyTorch checks: here, so that a bad one raises at the call. In the device
// server it would be noticed late, and for good.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace understudy::client {

at::Tensor& cauchy_(at::Tensor& self, double median, double sigma, std::optional<at::Generator> generator);
at::Tensor& exponential_(at::Tensor& self, double lambd, std::optional<at::Generator> generator);
at::Tensor& geometric_(at::Tensor& self, double p, std::optional<at::Generator> generator);
at::Tensor& log_normal_(at::Tensor& self, double mean, double std, std::optional<at::Generator> generator);
at::Tensor& normal_(at::Tensor& self, double mean, double std, std::optional<at::Generator> generator);
at::Tensor& uniform_(at::Tensor& self, double from, double to, std::optional<at::Generator> generator);

}  // namespace understudy::client
