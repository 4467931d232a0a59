#include "proxy_server/csrc/operators/equivalent_attention.h"

#include <cmath>
#include <limits>
#include <vector>

#include "proxy_server/csrc/operators/equivalents.h"

namespace understudy::server::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kStepOfLogsumexp = 32;  // the efficient kernel's rows are padded to multiples of it

bool given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

// Which keys a query sees, by their distance.
struct Sight {
  bool causal = false;
  bool from_the_end = true;    // the last query sees the last key; else the first one the first
  OptionalLength left, right;  // keys before and behind; none: all
};

OptionalLength window(OptionalLength size) { return size && *size >= 0 ? size : std::nullopt; }

// [queries, keys], or undefined if all are seen.
Tensor seen(int64_t queries, int64_t keys, const Sight& sight) {
  OptionalLength right = sight.right;
  if (sight.causal) right = 0;
  if (!right && !sight.left) return {};
  const int64_t shift = sight.from_the_end ? keys - queries : 0;
  const Tensor distance = at::arange(keys).unsqueeze(0) - (at::arange(queries).unsqueeze(1) + shift);
  Tensor mask = at::ones({queries, keys}, at::kBool);
  if (right) mask = mask & (distance <= *right);
  if (sight.left) mask = mask & (distance >= -*sight.left);
  return mask;
}

// One sequence, heads first, in the type that sums are made in; a group of queries' heads shares one of keys.
struct Sequence {
  Tensor query, key, value, bias;  // the last may be undefined
  int64_t group = 1;
  double scale = 1;
  Sight sight;

  Sequence(const Tensor& q, const Tensor& k, const Tensor& v, Tensor b, std::optional<double> s,
           const Sight& w)
      : bias(std::move(b)), sight(w) {
    const auto type = accumulation_type(q);
    TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                "attention of ", q.size(-2), " heads with keys of ", k.size(-2));
    group = q.size(1) / k.size(1);
    query = q.to(type).transpose(0, 1);
    key = k.to(type).transpose(0, 1).repeat_interleave(group, 0);
    value = v.to(type).transpose(0, 1).repeat_interleave(group, 0);
    scale = s ? *s : 1 / std::sqrt(static_cast<double>(q.size(2)));
  }

  Tensor scores() const {
    Tensor all = at::bmm(query, key.transpose(1, 2)) * scale;
    if (bias.defined()) all = all + bias.to(all.scalar_type());
    if (const Tensor mask = seen(query.size(1), key.size(1), sight); mask.defined())
      all = all.masked_fill(mask.logical_not(), -kInfinity);
    return all;
  }

  // Of the output [length, heads, width] and of the logarithms of the softmaxes' sums [heads, length]; who
  // sees nothing has zeros and infinity.
  std::pair<Tensor, Tensor> forward() const {
    const Tensor all = scores();
    Tensor sums = at::logsumexp(all, {-1});
    sums = sums.masked_fill(sums == -kInfinity, kInfinity);
    return {at::bmm((all - sums.unsqueeze(-1)).exp(), value).transpose(0, 1), sums};
  }

  struct Gradients {
    Tensor query, key, value, bias;
  };
  Gradients backward(const Tensor& grad_out, const Tensor& out, const Tensor& sums) const {
    const auto type = query.scalar_type();
    const Tensor shares = (scores() - sums.to(type).unsqueeze(-1)).exp();
    const Tensor given = grad_out.to(type).transpose(0, 1);
    const Tensor delta = (given * out.to(type).transpose(0, 1)).sum(-1, /*keepdim=*/true);
    const Tensor of_scores = shares * (at::bmm(given, value.transpose(1, 2)) - delta);
    const auto per_group = [&](const Tensor& gradient) {
      return gradient.reshape({-1, group, gradient.size(1), gradient.size(2)}).sum(1).transpose(0, 1);
    };
    return {at::bmm(of_scores, key).transpose(0, 1) * scale,
            per_group(at::bmm(of_scores.transpose(1, 2), query) * scale),
            per_group(at::bmm(shares.transpose(1, 2), given)), of_scores};
  }
};

// Where each sequence lies: in a batch, or one behind the other.
struct Layout {
  std::vector<int64_t> begin, length;
  bool packed = false;

  Layout(const Tensor& tensor, const OptionalTensor& cumulated) {
    packed = given(cumulated);
    if (!packed) {
      TORCH_CHECK(tensor.dim() == 4, "attention needs 4 dimensions where no lengths are given");
      for (int64_t i = 0; i < tensor.size(0); i++) begin.push_back(i), length.push_back(tensor.size(1));
      return;
    }
    const Tensor ends = cumulated->to(at::kLong).contiguous();
    TORCH_CHECK(ends.dim() == 1 && ends.numel() > 0, "cumulated lengths are a list that is not empty");
    const auto* values = ends.const_data_ptr<int64_t>();
    const int64_t all = tensor.size(tensor.dim() == 4 ? 1 : 0);
    for (int64_t i = 1; i < ends.numel(); i++) {
      TORCH_CHECK(0 <= values[i - 1] && values[i - 1] <= values[i] && values[i] <= all, "a sequence from ",
                  values[i - 1], " to ", values[i], " does not lie within ", all);
      begin.push_back(values[i - 1]), length.push_back(values[i] - values[i - 1]);
    }
  }
  size_t count() const { return begin.size(); }

  // Of [batch, length, heads, width] or [all lengths, heads, width]; a view.
  Tensor part(const Tensor& tensor, size_t i) const {
    if (!packed) return tensor.select(0, begin[i]);
    return (tensor.dim() == 4 ? tensor.select(0, 0) : tensor).narrow(0, begin[i], length[i]);
  }
};

void check_as_many(const Layout& queries, const Layout& keys) {
  TORCH_CHECK(queries.count() == keys.count(), "attention of ", queries.count(), " sequences with ",
              keys.count());
}

int64_t at_most(const OptionalTensor& lengths, size_t i, int64_t length) {
  if (!given(lengths)) return length;
  const auto used = lengths->select(0, static_cast<int64_t>(i)).item<int64_t>();
  TORCH_CHECK(0 <= used && used <= length, "a sequence uses ", used, " of ", length, " keys");
  return used;
}

void check_possible(const char* name, double dropout, bool others) {
  TORCH_CHECK_NOT_IMPLEMENTED(dropout == 0 && !others, name,
                              " with dropout, slopes, pages or a debug mask has no equivalent on the virtual",
                              " device's cpu driver; scaled_dot_product_attention has dropout");
}

Sight efficient_sight(int64_t mask_type, OptionalLength window_size) {
  TORCH_CHECK(0 <= mask_type && mask_type <= 2, "unknown mask of attention");
  OptionalLength left;
  if (window_size && *window_size > 0) left = *window_size - 1;
  return {mask_type != 0, mask_type != 1, left, std::nullopt};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& cum_seq_q,
    const OptionalTensor& cum_seq_k, int64_t, int64_t, double dropout_p, bool is_causal,
    bool return_debug_mask, std::optional<double> scale, OptionalLength window_size_left,
    OptionalLength window_size_right, const OptionalTensor& seqused_k, const OptionalTensor& alibi_slopes,
    const OptionalTensor& block_table, OptionalLength) {
  check_possible("_flash_attention_forward", dropout_p,
                 return_debug_mask || given(alibi_slopes) || given(block_table));
  const Layout queries(query, cum_seq_q), keys(key, cum_seq_k);
  check_as_many(queries, keys);
  const Sight sight{is_causal, true, window(window_size_left), window(window_size_right)};
  Tensor out = at::zeros_like(query);  // lengths need not reach the end
  const auto type = query.options().dtype(at::kFloat);
  Tensor sums = queries.packed ? at::zeros({query.size(1), query.size(0)}, type)
                               : at::zeros({query.size(0), query.size(2), query.size(1)}, type);
  for (size_t i = 0; i < queries.count(); i++) {
    const int64_t used = at_most(seqused_k, i, keys.length[i]);
    const Sequence sequence(queries.part(query, i), keys.part(key, i).narrow(0, 0, used),
                            keys.part(value, i).narrow(0, 0, used), {}, scale, sight);
    const auto [result, of_result] = sequence.forward();
    queries.part(out, i).copy_(result);
    (queries.packed ? sums.narrow(1, queries.begin[i], queries.length[i]) : sums.select(0, queries.begin[i]))
        .copy_(of_result);
  }
  const auto state = query.options().dtype(at::kUInt64);
  return {out, sums, at::zeros({2}, state), at::zeros({}, state), at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward_unpaged(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& cum_seq_q,
    const OptionalTensor& cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
    bool return_debug_mask, std::optional<double> scale, OptionalLength window_size_left,
    OptionalLength window_size_right, const OptionalTensor& seqused_k, const OptionalTensor& alibi_slopes) {
  return flash_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                       return_debug_mask, scale, window_size_left, window_size_right, seqused_k, alibi_slopes,
                       std::nullopt, std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& logsumexp, const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t, int64_t,
    double dropout_p, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale,
    OptionalLength window_size_left, OptionalLength window_size_right) {
  check_possible("_flash_attention_backward", dropout_p, false);
  const Layout queries(query, cum_seq_q), keys(key, cum_seq_k);
  check_as_many(queries, keys);
  const Sight sight{is_causal, true, window(window_size_left), window(window_size_right)};
  Tensor of_query = at::zeros_like(query), of_key = at::zeros_like(key), of_value = at::zeros_like(value);
  for (size_t i = 0; i < queries.count(); i++) {
    const Sequence sequence(queries.part(query, i), keys.part(key, i), keys.part(value, i), {}, scale, sight);
    const Tensor sums = queries.packed ? logsumexp.narrow(1, queries.begin[i], queries.length[i])
                                       : logsumexp.select(0, queries.begin[i]);
    const auto gradients = sequence.backward(queries.part(grad_out, i), queries.part(out, i), sums);
    queries.part(of_query, i).copy_(gradients.query);
    keys.part(of_key, i).copy_(gradients.key);
    keys.part(of_value, i).copy_(gradients.value);
  }
  return {of_query, of_key, of_value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    std::optional<c10::SymInt> max_seqlen_q, std::optional<c10::SymInt> max_seqlen_k, double dropout_p,
    int64_t custom_mask_type, bool compute_log_sumexp, std::optional<double> scale,
    const OptionalTensor& seqlen_k, OptionalLength window_size) {
  check_possible("_efficient_attention_forward", dropout_p, false);
  const Layout queries(query, cu_seqlens_q), keys(key, cu_seqlens_k);
  TORCH_CHECK(query.dim() == 4, "efficient attention needs 4 dimensions");
  check_as_many(queries, keys);
  const int64_t longest = queries.packed && max_seqlen_q ? max_seqlen_q->expect_int() : query.size(1);
  const int64_t rows =
      compute_log_sumexp ? (longest + kStepOfLogsumexp - 1) / kStepOfLogsumexp * kStepOfLogsumexp : 0;
  Tensor out = at::zeros({query.size(0), query.size(1), query.size(2), value.size(3)}, query.options());
  Tensor sums = at::full({static_cast<int64_t>(queries.count()), query.size(2), rows}, kInfinity,
                         query.options().dtype(at::kFloat));
  for (size_t i = 0; i < queries.count(); i++) {
    const int64_t used = at_most(seqlen_k, i, keys.length[i]);
    const Tensor added = given(bias) ? bias->select(0, queries.packed ? 0 : static_cast<int64_t>(i))
                                           .narrow(1, 0, queries.length[i])
                                           .narrow(2, 0, used)
                                     : Tensor();
    const Sequence sequence(queries.part(query, i), keys.part(key, i).narrow(0, 0, used),
                            keys.part(value, i).narrow(0, 0, used), added, scale,
                            efficient_sight(custom_mask_type, window_size));
    const auto [result, of_result] = sequence.forward();
    queries.part(out, i).copy_(result);
    if (rows != 0) sums.select(0, static_cast<int64_t>(i)).narrow(1, 0, queries.length[i]).copy_(of_result);
  }
  const auto state = query.options().dtype(at::kLong);
  return {out, sums, at::zeros({}, state), at::zeros({}, state), longest, max_seqlen_k.value_or(key.size(1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor& out, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, int64_t, int64_t, const Tensor& logsumexp, double dropout_p,
    const Tensor&, const Tensor&, int64_t custom_mask_type, bool bias_requires_grad,
    std::optional<double> scale, OptionalLength, OptionalLength window_size, bool) {
  check_possible("_efficient_attention_backward", dropout_p, false);
  const Layout queries(query, cu_seqlens_q), keys(key, cu_seqlens_k);
  TORCH_CHECK(query.dim() == 4, "efficient attention needs 4 dimensions");
  check_as_many(queries, keys);
  Tensor of_query = at::zeros_like(query), of_key = at::zeros_like(key), of_value = at::zeros_like(value);
  Tensor of_bias = given(bias) && bias_requires_grad ? at::zeros_like(*bias) : Tensor();
  for (size_t i = 0; i < queries.count(); i++) {
    const auto index = static_cast<int64_t>(i);
    const auto narrowed = [&](const Tensor& whole) {
      return whole.select(0, queries.packed ? 0 : index)
          .narrow(1, 0, queries.length[i])
          .narrow(2, 0, keys.length[i]);
    };
    const Sequence sequence(queries.part(query, i), keys.part(key, i), keys.part(value, i),
                            given(bias) ? narrowed(*bias) : Tensor(), scale,
                            efficient_sight(custom_mask_type, window_size));
    const auto gradients = sequence.backward(queries.part(grad_out, i), queries.part(out, i),
                                             logsumexp.select(0, index).narrow(1, 0, queries.length[i]));
    queries.part(of_query, i).copy_(gradients.query);
    keys.part(of_key, i).copy_(gradients.key);
    keys.part(of_value, i).copy_(gradients.value);
    if (of_bias.defined()) narrowed(of_bias).add_(gradients.bias);
  }
  return {of_query, of_key, of_value, of_bias};
}

}  // namespace understudy::server::attention
