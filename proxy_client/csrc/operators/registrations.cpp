// Everything the virtual device registers with PyTorch's dispatcher. Elsewhere: the allocator and hooks
// (cuda_hooks.cpp), the device guard (device_guard.cpp).
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "proxy_client/csrc/call/direct_call.h"
#include "proxy_client/csrc/call/operator_call.h"
#include "proxy_client/csrc/operators/local_kernels.h"
#include "proxy_client/csrc/operators/own_kernel.h"
#include "proxy_client/csrc/operators/random_checks.h"
#include "proxy_client/csrc/operators/silent_warnings.h"
#include "proxy_client/csrc/transfers.h"

namespace understudy::client {
namespace {

using c10::DispatchKey;

torch::CppFunction forward_boxed() { return torch::CppFunction::makeFromBoxedFunction<&forward_call>(); }

// Collectives have kernels for CUDA in every build; our tensors arrive at PrivateUse1.
void redispatch_to_cuda(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CUDA), stack);
}

std::set<std::string> registered_at(DispatchKey key, const std::string& prefix) {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key))
    if (name.name.rfind(prefix, 0) == 0) names.insert(toString(name));
  return names;
}

// What the driver must see whole, because the worker would decompose it otherwise.
std::set<std::string> forwarded_operators() {
  std::set<std::string> names{"aten::convolution", "aten::convolution_backward", "aten::native_dropout",
                              "aten::_fused_sdp_choice",
                              // Their composite kernels call a kernel of the CPU's directly.
                              "aten::mode.values", "aten::conj_physical_"};
  // Operators with a CPU kernel *and* a composite one: layer_norm, for example, would take another algorithm.
  const auto cpu = registered_at(DispatchKey::CPU, "aten::");
  for (const auto key : {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
                         DispatchKey::CompositeExplicitAutogradNonFunctional})
    for (const auto& name : registered_at(key, "aten::"))
      if (cpu.count(name) != 0) names.insert(name);
  // Decomposed, a foreach operator would be one record per tensor.
  for (const auto& name : registered_at(DispatchKey::CompositeExplicitAutograd, "aten::_foreach_"))
    if (name.find("out", name.find('.')) == std::string::npos && name != "aten::_foreach_mm")
      names.insert(name);
  return names;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(forward_boxed()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  OwnKernel own[] = {
      // memory
      {"empty.memory_format", TORCH_FN(empty_memory_format)},
      {"empty_strided", TORCH_FN(empty_strided)},
      {"_efficientzerotensor", TORCH_FN(efficient_zero_tensor)},
      {"resize_", TORCH_FN(resize_)},
      {"set_.source_Storage_storage_offset", TORCH_FN(set_storage_with_offset)},
      {"set_.source_Storage", TORCH_FN(set_storage)},
      {"set_.source_Tensor", TORCH_FN(at::native::set_tensor_)},
      {"set_", TORCH_FN(set_empty)},
      {"record_stream", TORCH_FN(record_stream)},
      // views
      {"view", TORCH_FN(view)},
      {"as_strided", TORCH_FN(as_strided)},
      {"_reshape_alias", TORCH_FN(reshape_alias)},
      {"unfold", TORCH_FN(unfold)},
      {"view_as_real", TORCH_FN(view_as_real)},
      {"view_as_complex", TORCH_FN(view_as_complex)},
      // transfers
      {"copy_", TORCH_FN(copy_)},
      {"_copy_from", TORCH_FN(copy_from)},
      {"_local_scalar_dense", TORCH_FN(local_scalar_dense)},
      // their numbers are checked here
      {"cauchy_", TORCH_FN(cauchy_)},
      {"exponential_", TORCH_FN(exponential_)},
      {"geometric_", TORCH_FN(geometric_)},
      {"log_normal_", TORCH_FN(log_normal_)},
      {"normal_", TORCH_FN(normal_)},
      {"uniform_", TORCH_FN(uniform_)},
  };
  std::set<std::string> forwarded = forwarded_operators();
  for (OwnKernel& kernel : own) {
    forwarded.erase(std::string("aten::") + kernel.name);
    library.impl(kernel.name, std::move(kernel.function));
  }
  const std::set<std::string> on_driver = registered_at(DispatchKey::CPU, "aten::");
  DirectRegistry direct(library, forwarded, on_driver);
  register_direct_elementwise(direct);
  register_direct_layers(direct);
  register_direct_lists(direct);
  for (const std::string& name : forwarded)
    library.impl(name.substr(sizeof("aten::") - 1).c_str(), forward_boxed());
}

// Factories are looked up at CUDA, and a CPU-only build has nothing there; from_blob makes tensors that carry
// only that key.
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(forward_boxed()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  OwnKernel own[] = {
      {"empty.memory_format", TORCH_FN(empty_memory_format)},
      {"empty_strided", TORCH_FN(empty_strided)},
      {"_efficientzerotensor", TORCH_FN(efficient_zero_tensor)},
      {"set_.source_Storage", TORCH_FN(set_storage)},
      {"copy_", TORCH_FN(copy_)},
  };
  // A CUDA build has kernels of its own here, which would look for a driver: none may be left. (Replacing a
  // kernel warns.)
  const SilentWarnings silent;
  std::set<std::string> forwarded = registered_at(DispatchKey::CUDA, "aten::");
  forwarded.insert({"aten::tril_indices", "aten::triu_indices"});
  for (OwnKernel& kernel : own) {
    forwarded.erase(std::string("aten::") + kernel.name);
    library.impl(kernel.name, std::move(kernel.function));
  }
  for (const std::string& name : forwarded)
    library.impl(name.substr(sizeof("aten::") - 1).c_str(), forward_boxed());
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, library) {
  // PyTorch has kernels here that would look for a backend of a device "privateuseone", and would warn.
  const SilentWarnings silent;
  for (const auto& name : registered_at(DispatchKey::CUDA, "c10d::"))
    library.impl(name.substr(sizeof("c10d::") - 1).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&redispatch_to_cuda>());
}

}  // namespace understudy::client
