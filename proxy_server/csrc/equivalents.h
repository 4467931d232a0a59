// Operators that only CUDA has kernels for, computed by other operators on the `cpu` driver.
#pragma once
#include <string>
#include <vector>

namespace understudy::server {

// Their names, without namespace. They are registered with PyTorch's dispatcher as CPU kernels when this
// library is loaded, so the executor runs them like any other operator.
std::vector<std::string> equivalent_operators();

}  // namespace understudy::server
