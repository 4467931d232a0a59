// Forwarding a call with sparse arguments: each goes as a composite of dense tensors
// (replay/csrc/log/log_format.h, Tag::kSparse), and sparse results come back as such.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace understudy::client {

// A boxed kernel for every operator that meets a sparse tensor. It waits for the device server, as the number
// of elements of a sparse result is known nowhere else; only operators that do nothing but change dense
// arguments (`dense.add_(sparse)`) are asynchronous.
void forward_sparse_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace understudy::client
