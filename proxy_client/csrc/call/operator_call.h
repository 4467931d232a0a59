// The boxed fallback: every operator that has no kernel of its own here becomes a record.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <utility>
#include <vector>

namespace understudy::client {

void forward_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Every row of the tables of typed kernels (direct_*.cpp), and whether it is in use.
std::vector<std::pair<std::string, bool>>& direct_operators();

}  // namespace understudy::client
