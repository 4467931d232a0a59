// Whether the tensors of a call may be together in it, where PyTorch's CUDA kernels look at that.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>
#include <vector>

#include "proxy_client/csrc/operators/operator_info.h"

namespace understudy::client {

// A CPU tensor that is no single number may not meet a cuda tensor, but for the arguments of
// host_arguments_used(). Throws c10::Error with the text that CUDA kernels give, and c10::NotImplementedError
// for a CPU tensor that is too large for a record.
void check_devices(const c10::OperatorHandle& op, const OperatorInfo& info,
                   c10::ArrayRef<c10::IValue> arguments);

// The arguments, as "operator name", that may be on the CPU whatever the others are on, and how often one
// was.
std::vector<std::pair<std::string, uint64_t>> host_arguments_used();

// A record holds 1 MiB; what is larger must be moved to the device by the script.
inline constexpr size_t kMaxHostTensorBytes = 512 << 10;

}  // namespace understudy::client
