// What the kernels of sparse tensors take on trust, and records must therefore show: every index lies inside,
// and what is said to be sorted is. Shapes that do not fit are a malformed record (replay::LogError); wrong
// content is the program's own error (c10::Error), as a script can make such a tensor with unchecked calls.
#pragma once
#include <ATen/core/Tensor.h>

#include "proxy_server/csrc/calls/composite.h"

namespace understudy::server {

void check_coo(const CompositeSpec& spec, const at::Tensor& indices, const at::Tensor& values,
               bool coalesced);

void check_compressed(const CompositeSpec& spec, const at::Tensor& compressed_indices,
                      const at::Tensor& plain_indices, const at::Tensor& values);

// Every component lies inside the buffer, which is a whole storage.
void check_nested(const CompositeSpec& spec, const at::Tensor& sizes, const at::Tensor& strides,
                  const at::Tensor& offsets, const at::Tensor& buffer);

}  // namespace understudy::server
