// Tensors of the device as kernels see them, and what kernels answered as tensors of the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace understudy::simulated {

// What tells two calls' tensors apart but for their content.
struct Form {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType type = at::kByte;
  bool conjugated = false, negated = false;
  bool operator==(const Form&) const = default;
};

Form form_of(const at::Tensor& tensor);
at::Tensor with_form(c10::Storage storage, c10::DispatchKey key, const Form& form);

// The same tensor for a kernel of the CPU, of a tensor of the device. It does not keep the memory: as on a
// GPU, the order of the stream does, or nobody.
at::Tensor host_view(const at::Tensor& tensor);
c10::Storage host_view(const c10::Storage& storage);

c10::Storage device_storage(uint64_t bytes);

}  // namespace understudy::simulated
