// A call as words: what stays the same from step to step is the key, what changes are the values
// (replay/csrc/log/log_format.h, Tag).
#pragma once
#include <ATen/core/ivalue.h>

#include <vector>

#include "proxy_client/csrc/call/word_buffer.h"
#include "proxy_client/csrc/operators/operator_info.h"
#include "proxy_client/csrc/session.h"

namespace understudy::client {

struct Encoding {
  // key[0] is the address of the operator's OperatorInfo and not stored in the dictionary.
  WordBuffer key, values;
};

// Handles, doubles, generators and the content of CPU tensors become values, everything else is key.
void encode_call(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments, LogWriter& log,
                 Encoding& out);

// One argument, as encode_call encodes it. `index` counts from 0.
void encode_argument(const OperatorInfo& info, size_t index, const c10::IValue& argument, LogWriter& log,
                     Encoding& out);

// A tensor outside a template (collectives): tensor word, handle, offset, sizes, strides.
void append_raw_tensor(const at::Tensor& tensor, WordBuffer& words);

// The defined cuda tensors among the arguments, in order.
std::vector<at::Tensor> device_tensors(c10::ArrayRef<c10::IValue> arguments);

}  // namespace understudy::client
