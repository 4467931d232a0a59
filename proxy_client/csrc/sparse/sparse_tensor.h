// Sparse tensors of the virtual device: PyTorch's own kinds of tensor over dense tensors of ours.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace understudy::client {

// Key sets like kKeys (client_tensor.h): PrivateUse1 first, the CUDA bit for the rest of PyTorch.
inline constexpr c10::DispatchKeySet kSparseKeys = c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1) |
                                                   c10::DispatchKeySet(c10::DispatchKey::SparseCUDA) |
                                                   c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA);
inline constexpr c10::DispatchKeySet kSparseCompressedKeys =
    c10::DispatchKeySet(c10::DispatchKey::SparseCsrPrivateUse1) |
    c10::DispatchKeySet(c10::DispatchKey::SparseCsrCUDA) |
    c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA);

// COO. `indices` and `values` are shared, not copied; raises as PyTorch does if they do not fit `sizes`. A
// tensor of unknown order counts as coalesced if it has at most one element.
at::Tensor make_sparse(int64_t sparse_dim, c10::IntArrayRef sizes, const at::Tensor& indices,
                       const at::Tensor& values, std::optional<bool> coalesced);

// CSR, CSC, BSR or BSC. The three tensors are shared, not copied.
at::Tensor make_sparse_compressed(c10::Layout layout, c10::IntArrayRef sizes,
                                  const at::Tensor& compressed_indices, const at::Tensor& plain_indices,
                                  const at::Tensor& values);

// A tensor that is made of dense ones.
inline bool is_composite(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.layout() != at::kStrided || tensor.is_nested());
}

// The dense tensors it is made of: [indices, values] or [compressed indices, plain indices, values] or
// [the buffer of a nested tensor].
std::vector<at::Tensor> pieces(const at::Tensor& composite);

// `to` becomes what `from` is, of the same layout (and, of nested ones, shape); both then share their pieces.
void assign_composite(const at::Tensor& to, const at::Tensor& from);

}  // namespace understudy::client
