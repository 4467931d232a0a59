// Operators that are not PyTorch's own: of the script (torch.library) or of a library it loaded
// (TORCH_LIBRARY).
//
//   composite                              PyTorch decomposes it before it comes here
//   C++ kernel for the driver's device     goes into the log; the server loads the same libraries
//   any other kernel for cuda (Python)     runs in the worker; what it calls comes back one by one
//   none of these                          an error that says so
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace understudy::client {

// True if `op` ran in the worker (its results are on the stack); false if it is to be forwarded.
bool run_custom_operator_here(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// `name`, then the paths of the libraries in this process that may register operators with PyTorch, in the
// order of loading, with zero bytes between them (docs/custom-operators.md).
std::string with_libraries(const std::string& name);

}  // namespace understudy::client
