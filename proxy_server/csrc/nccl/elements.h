// What tensors are to NCCL: so many elements of one of its types, and a reduction that it has. Differs
// nowhere from ProcessGroupNCCL, whose words these are; the worker says them before, so that here they tell
// of a log that makes no sense.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "proxy_server/csrc/nccl/library.h"

namespace understudy::server::nccl {

// Throws LogError.
DataType type_of(const at::Tensor& tensor);
Reduction reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor);

// Those of a complex tensor are twice as many.
size_t count_of(const at::Tensor& tensor);

void send_to(const Library& nccl, const at::Tensor& from, int peer, Handle handle, DeviceStream stream);
void receive_from(const Library& nccl, const at::Tensor& into, int peer, Handle handle, DeviceStream stream);

}  // namespace understudy::server::nccl
