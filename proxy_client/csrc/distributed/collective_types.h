// What NCCL takes, and what PyTorch raises at the call for what it does not: the script catches it and goes
// on.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace understudy::client {

// Raises TypeError for a type that NCCL has no name for (getNcclDataType in PyTorch's NCCLUtils.cpp).
void check_collective_type(const at::Tensor& tensor);

// Raises TypeError or ValueError for what cannot be reduced so (getNcclReduceOp in ProcessGroupNCCL.cpp).
// Of bits: the `cpu` driver reduces integers, which NCCL does not, as Gloo on CUDA tensors does.
void check_reduction(const c10d::ReduceOp& op, const at::Tensor& tensor);

// The same memory as what travels: pairs of real numbers for complex ones, bytes for eight-bit floating
// point.
at::Tensor as_it_travels(const at::Tensor& tensor);

}  // namespace understudy::client
