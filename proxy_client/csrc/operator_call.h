// The boxed fallback: every operator that has no kernel of its own here becomes a record.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace understudy::client {

void forward_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace understudy::client
