// What the virtual device registers for sparse tensors (dense ones: registrations.cpp).
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

#include "proxy_client/csrc/operators/silent_warnings.h"
#include "proxy_client/csrc/sparse/forwarding.h"
#include "proxy_client/csrc/sparse/sparse_call.h"
#include "proxy_client/csrc/sparse/sparse_kernels.h"

namespace understudy::client {
namespace {

using c10::DispatchKey;

// The one collective that takes sparse tensors has its kernel for CUDA in every build.
void redispatch_to_sparse_cuda(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::SparseCUDA), stack);
}

std::vector<OwnKernel> coo_kernels() {
  std::vector<OwnKernel> own;
  const auto add = [&](const char* name, auto kernel) { own.emplace_back(name, kernel); };
  add("empty.memory_format", TORCH_FN(empty_sparse));
  add("empty_like", TORCH_FN(at::native::empty_like_sparse_coo));
  add("_sparse_coo_tensor_with_dims", TORCH_FN(sparse_with_dims));
  add("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(sparse_with_tensors));
  add("clone", TORCH_FN(clone_composite));
  add("_indices", TORCH_FN(at::native::_indices_sparse));
  add("_values", TORCH_FN(at::native::_values_sparse));
  add("indices", TORCH_FN(at::native::indices_sparse));
  add("values", TORCH_FN(at::native::values_sparse));
  add("_nnz", TORCH_FN(at::native::_nnz_sparse));
  add("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  add("_dimI", TORCH_FN(at::native::sparse_dim_sparse));
  add("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  add("_dimV", TORCH_FN(at::native::dense_dim_sparse));
  add("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  add("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  add("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
  add("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
  add("sparse_resize_", TORCH_FN(at::native::sparse_resize_));
  add("sparse_resize_and_clear_", TORCH_FN(at::native::sparse_resize_and_clear_));
  add("resize_as_sparse_", TORCH_FN(at::native::resize_as_sparse_));
  add("zero_", TORCH_FN(at::native::zero_sparse_));
  add("zeros.out", TORCH_FN(at::native::zeros_sparse_out));
  add("is_pinned", TORCH_FN(at::native::is_pinned_sparse_coo));
  return own;
}

std::vector<OwnKernel> compressed_kernels() {
  std::vector<OwnKernel> own;
  const auto add = [&](const char* name, auto kernel) { own.emplace_back(name, kernel); };
  add("empty.memory_format", TORCH_FN(empty_sparse_compressed));
  add("empty_like", TORCH_FN(at::native::empty_like_sparse_csr));
  add("sparse_compressed_tensor.comp_plain_value_size", TORCH_FN(sparse_compressed_checked));
  add("_sparse_compressed_tensor_unsafe", TORCH_FN(sparse_compressed_unchecked));
  add("clone", TORCH_FN(clone_composite));
  add("crow_indices", TORCH_FN(at::native::crow_indices_sparse_csr));
  add("col_indices", TORCH_FN(at::native::col_indices_sparse_csr));
  add("ccol_indices", TORCH_FN(at::native::ccol_indices_sparse_csr));
  add("row_indices", TORCH_FN(at::native::row_indices_sparse_csr));
  add("values", TORCH_FN(at::native::values_sparse_csr));
  add("_nnz", TORCH_FN(at::native::_nnz_sparse_csr));
  add("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse_csr));
  add("dense_dim", TORCH_FN(at::native::dense_dim_sparse_csr));
  add("copy_", TORCH_FN(at::native::copy_sparse_compressed_));
  add("resize_", TORCH_FN(at::native::resize_sparse_csr_));
  add("resize_as_sparse_", TORCH_FN(at::native::resize_as_sparse_compressed_));
  add("zero_", TORCH_FN(at::native::zero_sparse_csr_));
  add("is_pinned", TORCH_FN(at::native::is_pinned_sparse_compressed));
  return own;
}

}  // namespace

torch::CppFunction forward_composites() {
  return torch::CppFunction::makeFromBoxedFunction<&forward_sparse_call>();
}

void register_all(torch::Library& library, std::vector<OwnKernel> own, DispatchKey driver_key,
                  DispatchKey key) {
  const SilentWarnings silent;
  std::set<std::string> forwarded;
  for (const DispatchKey from : {driver_key, key})
    for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(from))
      if (name.name.rfind("aten::", 0) == 0) forwarded.insert(toString(name).substr(sizeof("aten::") - 1));
  for (OwnKernel& kernel : own) {
    forwarded.erase(kernel.name);
    library.impl(kernel.name, std::move(kernel.function));
  }
  for (const std::string& name : forwarded) library.impl(name.c_str(), forward_composites());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) { library.fallback(forward_composites()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, library) { library.fallback(forward_composites()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) { library.fallback(forward_composites()); }
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, library) { library.fallback(forward_composites()); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  register_all(library, coo_kernels(), DispatchKey::SparseCPU, DispatchKey::SparsePrivateUse1);
}
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, library) {
  register_all(library, compressed_kernels(), DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrPrivateUse1);
}

// Factories are looked up here; a few of PyTorch's own functions make tensors that carry only this key.
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  register_all(library, coo_kernels(), DispatchKey::SparseCPU, DispatchKey::SparseCUDA);
}
TORCH_LIBRARY_IMPL(aten, SparseCsrCUDA, library) {
  register_all(library, compressed_kernels(), DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrCUDA);
}

TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, library) {
  library.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&redispatch_to_sparse_cuda>());
}

// Dense tensors that become sparse, and checks whose errors belong to the call that asked for them.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name :
       {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr",
        "_to_sparse_bsc", "_spdiags", "_validate_compressed_sparse_indices"})
    library.impl(name, forward_composites());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_sparse_compressed_tensor_unsafe", TORCH_FN(sparse_compressed_unchecked));
}

}  // namespace understudy::client
