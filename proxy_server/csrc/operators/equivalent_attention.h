// Attention's operators that only CUDA has kernels for, computed by products and softmaxes on the `cpu`
// driver.
#pragma once
#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace understudy::server::attention {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalLength = std::optional<int64_t>;

// As in PyTorch's schemas. Queries, keys and values are [batch, length, heads, width], or, where cumulated
// lengths say which of them belong together, [all lengths, heads, width]. All throw NotImplementedError for
// dropout, whose random numbers only CUDA draws so, and for pages of a cache.

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& cum_seq_q,
    const OptionalTensor& cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
    bool return_debug_mask, std::optional<double> scale, OptionalLength window_size_left,
    OptionalLength window_size_right, const OptionalTensor& seqused_k, const OptionalTensor& alibi_slopes,
    const OptionalTensor& block_table, OptionalLength num_splits);

// As PyTorch 2.11 has it, without pages and splits.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward_unpaged(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& cum_seq_q,
    const OptionalTensor& cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
    bool return_debug_mask, std::optional<double> scale, OptionalLength window_size_left,
    OptionalLength window_size_right, const OptionalTensor& seqused_k, const OptionalTensor& alibi_slopes);

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& logsumexp, const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q, int64_t max_k,
    double dropout_p, bool is_causal, const Tensor& rng_state, const Tensor& unused,
    std::optional<double> scale, OptionalLength window_size_left, OptionalLength window_size_right);

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    std::optional<c10::SymInt> max_seqlen_q, std::optional<c10::SymInt> max_seqlen_k, double dropout_p,
    int64_t custom_mask_type, bool compute_log_sumexp, std::optional<double> scale,
    const OptionalTensor& seqlen_k, OptionalLength window_size);

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor& out, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, const Tensor& logsumexp,
    double dropout_p, const Tensor& philox_seed, const Tensor& philox_offset, int64_t custom_mask_type,
    bool bias_requires_grad, std::optional<double> scale, OptionalLength num_splits_key,
    OptionalLength window_size, bool shared_storage_dqdkdv);

}  // namespace understudy::server::attention
