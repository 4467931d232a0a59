// Operators that only CUDA has kernels for, computed by other operators on the `cpu` driver.
#pragma once
#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace understudy::server {

// What sums of such numbers are made in.
inline at::ScalarType accumulation_type(const at::Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

// Their names, without namespace. They are registered with PyTorch's dispatcher as CPU kernels when this
// library is loaded, so the executor runs them like any other operator.
std::vector<std::string> equivalent_operators();

}  // namespace understudy::server
