// Copies between host and device.
#pragma once
#include <ATen/core/Tensor.h>

namespace understudy::client {

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);
at::Scalar local_scalar_dense(const at::Tensor& self);

}  // namespace understudy::client
