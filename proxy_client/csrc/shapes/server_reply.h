// The answer to a synchronous operator: values, and the layout of the tensors it made.
#pragma once
#include <ATen/core/ivalue.h>

#include <vector>

namespace understudy::client {

// `payload` as the device server wrote it (kOperatorSync). Tensors with a known handle share the storage of
// the device argument that has it.
std::vector<c10::IValue> decode_reply(const uint8_t* payload, size_t bytes,
                                      c10::ArrayRef<at::Tensor> device_arguments, c10::DeviceIndex device);

}  // namespace understudy::client
