// What the virtual device registers for nested tensors of layout strided.
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "proxy_client/csrc/sparse/forwarding.h"
#include "proxy_client/csrc/sparse/sparse_call.h"

namespace understudy::client {
namespace {

using c10::DispatchKey;

std::vector<OwnKernel> nested_kernels() {
  std::vector<OwnKernel> own;
  const auto add = [&](const char* name, auto kernel) { own.emplace_back(name, kernel); };
  add("_nested_tensor_size", TORCH_FN(at::native::_nested_tensor_size));
  add("_nested_tensor_strides", TORCH_FN(at::native::_nested_tensor_strides));
  add("_nested_tensor_storage_offsets", TORCH_FN(at::native::_nested_tensor_storage_offsets));
  add("alias", TORCH_FN(at::native::alias_nested));
  add("detach", TORCH_FN(at::native::detach));
  add("is_same_size", TORCH_FN(at::native::nested_is_same_size));
  add("empty_like", TORCH_FN(at::native::empty_like_nested));
  add("_to_copy", TORCH_FN(at::native::_to_copy_nested));
  add("copy_", TORCH_FN(at::native::copy_nested_));
  return own;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, library) { library.fallback(forward_composites()); }
TORCH_LIBRARY_IMPL(_, NestedTensorCUDA, library) { library.fallback(forward_composites()); }

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  register_all(library, nested_kernels(), DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorPrivateUse1);
}
TORCH_LIBRARY_IMPL(aten, NestedTensorCUDA, library) {
  register_all(library, nested_kernels(), DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_nested_view_from_buffer", TORCH_FN(at::native::_nested_view_from_buffer));
}

}  // namespace understudy::client
