// An operator with a kernel of its own in the worker, as a row of a table.
#pragma once
#include <torch/library.h>

namespace understudy::client {

struct OwnKernel {
  template <class Function>
  OwnKernel(const char* operator_name, Function kernel) : name(operator_name), function(kernel) {}
  const char* name;
  torch::CppFunction function;
};

}  // namespace understudy::client
