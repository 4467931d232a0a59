// Operators that CUDA computes of element types for which the CPU has no kernel: the CPU's kernel of a wider
// type stands in, and what it gives is narrowed again.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace understudy::server {

struct Template;

// How the calls of one template are computed.
struct Widening {
  c10::OperatorHandle op;
  c10::ScalarType narrow{};  // what tensors come in, and results go out
  bool narrows_back = true;  // else results are of the wider type
  bool skips_nan = false;    // the first argument's NaNs count as zero
  int argument = -1;         // one that names a type, and what it is instead
  c10::IValue instead;
};

// None if the CPU has a kernel for the call.
std::shared_ptr<const Widening> widening_of(const Template& call);

// Arguments on the stack become results, as after a call of the operator itself. `t` has a widening.
void run_widened(const Template& t, c10::DispatchKeySet keys, torch::jit::Stack& stack);

// Names of operators, each with an element type that it is widened for: what a test looks at.
std::vector<std::pair<std::string, std::string>> widened_operators();

}  // namespace understudy::server
