#include "proxy_client/csrc/operators/device_check.h"

#include <ATen/ATen.h>
#include <ATen/core/op_registration/adaption.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

namespace understudy::client {
namespace {

using at::Tensor;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

struct HostArgument {
  const char* operator_name;
  const char* argument;
};

// Indices and probabilities are brought to the device by the kernels of CUDA; the others are read by the
// host.
constexpr HostArgument kOnHost[] = {
    {"aten::_foreach_addcdiv", "scalars"},
    {"aten::_foreach_addcdiv_", "scalars"},
    {"aten::_foreach_addcmul", "scalars"},
    {"aten::_foreach_addcmul_", "scalars"},
    {"aten::_index_put_impl_", "indices"},
    {"aten::_nested_from_padded", "cpu_nested_shape_example"},
    {"aten::bernoulli_", "p"},
    {"aten::index", "indices"},
};
std::array<std::atomic<uint64_t>, std::size(kOnHost)> uses_on_host{};

bool may_be_on_host(const std::string& operator_name, const std::string& argument) {
  for (size_t i = 0; i < std::size(kOnHost); i++)
    if (operator_name == kOnHost[i].operator_name && argument == kOnHost[i].argument) {
      uses_on_host[i].fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  return false;
}

template <class Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return;
  for (const IValue& item : value.toListRef())
    if (item.isTensor()) visit(item.toTensor());
}

// As PyTorch's generator of code names its wrappers of CUDA kernels; those with a meta kernel are structured.
std::string wrapper_name(const c10::OperatorHandle& op, const OperatorInfo& info) {
  const std::string name = op.schema().name().substr(sizeof("aten::") - 1);
  const std::string& overload = op.schema().overload_name();
  if (!info.shape_kernel) return "wrapper_CUDA_" + overload + "_" + name;
  return "wrapper_CUDA_" + name + (overload.empty() ? "" : "_" + overload);
}

// Of a tensor on the CPU or on cuda, as Tensor::toString() says it there.
std::string type_of(const Tensor& tensor) {
  return std::string(tensor.is_cuda() ? "CUDA" : "CPU") + c10::toString(tensor.scalar_type()) + "Type";
}

void check_convolution(Arguments arguments) {
  const Tensor& input = arguments[0].toTensor();
  const auto check = [&](const Tensor& other, const char* what) {
    TORCH_CHECK(!other.defined() || other.device() == input.device(), "Input type (", type_of(input),
                ") and ", what, " type (", type_of(other), ") should be the same");
  };
  check(arguments[1].toTensor(), "weight");
  if (arguments[2].isTensor()) check(arguments[2].toTensor(), "bias");
}

// What TensorIterator does, of which pointwise operators and lists of them are made.
[[noreturn]] void refuse_together(const Tensor& on_device) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
              on_device.device(), " and cpu!");
}

}  // namespace

void check_devices(const c10::OperatorHandle& op, const OperatorInfo& info, Arguments arguments) {
  if (info.custom) return;  // what it accepts is its author's business
  const auto& schema = op.schema();
  const bool iterates = op.hasTag(at::Tag::pointwise) || schema.name().rfind("aten::_foreach_", 0) == 0;
  const Tensor* first = nullptr;      // of those that must agree
  const Tensor* on_device = nullptr;  // one of them
  const Tensor* on_host = nullptr;
  std::string argument;  // that disagrees with the first
  const Tensor* disagrees = nullptr;
  size_t largest = 0;
  const auto look = [&](size_t i) {
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_cpu() && tensor.layout() == at::kStrided) largest = std::max(largest, tensor.nbytes());
      const bool number = tensor.is_cpu() && tensor.dim() == 0 && !info.writes[i];
      if (number || (tensor.is_cpu() && may_be_on_host(schema.name(), schema.arguments()[i].name()))) return;
      if (tensor.is_cpu()) on_host = &tensor;
      if (tensor.is_cuda()) on_device = &tensor;
      if (!first) first = &tensor;
      if (!disagrees && first->device() != tensor.device()) {
        disagrees = &tensor;
        argument = schema.arguments()[i].name();
      }
    });
  };
  for (size_t i = 0; i < arguments.size(); i++)
    if (info.writes[i] && schema.arguments()[i].kwarg_only()) look(i);  // out= comes first
  for (size_t i = 0; i < arguments.size(); i++)
    if (!info.writes[i] || !schema.arguments()[i].kwarg_only()) look(i);
  if (on_host && on_device) {
    if (schema.name() == "aten::convolution") check_convolution(arguments);
    if (iterates) refuse_together(*on_device);
    if (disagrees)
      c10::impl::common_device_check_failure(first->device(), *disagrees, wrapper_name(op, info).c_str(),
                                             argument.c_str());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(largest <= kMaxHostTensorBytes, "a CPU tensor of ", largest,
                              " bytes is an argument of a cuda operator; move it to the device first");
}

std::vector<std::pair<std::string, uint64_t>> host_arguments_used() {
  std::vector<std::pair<std::string, uint64_t>> used;
  for (size_t i = 0; i < std::size(kOnHost); i++)
    used.emplace_back(std::string(kOnHost[i].operator_name) + " " + kOnHost[i].argument,
                      uses_on_host[i].load());
  return used;
}

}  // namespace understudy::client
