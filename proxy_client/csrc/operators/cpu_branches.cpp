#include "proxy_client/csrc/operators/cpu_branches.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <atomic>

#include "proxy_client/csrc/call/operator_call.h"
#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/operators/recurrent.h"

namespace understudy::client {
namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr size_t kRows = 15;
std::array<std::atomic<uint64_t>, kRows> uses{};

// Whether cuDNN's or MIOpen's CTC loss takes the call: on the CPU neither is there.
bool no_vendor_loss(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t) { return false; }
bool no_vendor_loss_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) {
  return false;
}

// As ATen's composite does it on a CPU: elsewhere it takes a fused kernel, whose last bit differs for one
// probability in five (float32), and whose gradient does for nine in ten (half precision).
Tensor dropout(const Tensor& input, double p, bool train) {
  if (!train || p <= 0 || p >= 1 || input.sym_numel() == 0) return at::native::dropout(input, p, train);
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

template <class... Arguments>
bool ask_driver(const char* name, const char* overload, Arguments... arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  torch::jit::Stack stack{arguments...};
  forward_call(op, c10::DispatchKeySet(), &stack);
  return stack.back().toBool();
}
// The driver can be asked only about what it has; fake tensors take the loss that every device has.
bool is_on_driver(const Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::PrivateUse1); }
enum Vendor { kCudnn, kMiopen };
constexpr const char* kQuestions[] = {"aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss"};
template <Vendor V>
bool ask_vendor_loss(const Tensor& log_probs, const Tensor& targets, IntArrayRef input_lengths,
                     IntArrayRef target_lengths, int64_t blank) {
  return is_on_driver(log_probs) &&
         ask_driver(kQuestions[V], "", log_probs, targets, input_lengths, target_lengths, blank);
}
template <Vendor V>
bool ask_vendor_loss_of_tensors(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                                const Tensor& target_lengths, int64_t blank) {
  return is_on_driver(log_probs) &&
         ask_driver(kQuestions[V], "Tensor", log_probs, targets, input_lengths, target_lengths, blank);
}

// Two functions of one type; the driver decides which of them is called.
template <size_t Row, auto OnCpu, auto Elsewhere>
struct Choice;
template <size_t Row, class Result, class... Arguments, Result (*OnCpu)(Arguments...),
          Result (*Elsewhere)(Arguments...)>
struct Choice<Row, OnCpu, Elsewhere> {
  static Result call(Arguments... arguments) {
    if (!driver_is_cpu()) return Elsewhere(arguments...);
    uses[Row].fetch_add(1, std::memory_order_relaxed);
    return OnCpu(arguments...);
  }
};

struct Row {
  const char* name;
  torch::CppFunction (*kernel)();
};

template <size_t Index, auto OnCpu, auto Elsewhere>
torch::CppFunction kernel() {
  using Chosen = Choice<Index, OnCpu, Elsewhere>;
  return torch::CppFunction(TORCH_FN(Chosen::call));
}

// at::native has several functions of each of these names: the one of the same type is meant.
#define UNDERSTUDY_ROW(INDEX, NAME, OURS, PYTORCHS) \
  {NAME, &kernel<INDEX, &OURS, static_cast<decltype(&OURS)>(&PYTORCHS)>}

constexpr std::array<Row, kRows> kTable{{
    UNDERSTUDY_ROW(0, "lstm.input", recurrent::lstm, at::native::lstm),
    UNDERSTUDY_ROW(1, "lstm.data", recurrent::lstm_packed, at::native::lstm),
    UNDERSTUDY_ROW(2, "gru.input", recurrent::gru, at::native::gru),
    UNDERSTUDY_ROW(3, "gru.data", recurrent::gru_packed, at::native::gru),
    UNDERSTUDY_ROW(4, "rnn_tanh.input", recurrent::rnn_tanh, at::native::rnn_tanh),
    UNDERSTUDY_ROW(5, "rnn_tanh.data", recurrent::rnn_tanh_packed, at::native::rnn_tanh),
    UNDERSTUDY_ROW(6, "rnn_relu.input", recurrent::rnn_relu, at::native::rnn_relu),
    UNDERSTUDY_ROW(7, "rnn_relu.data", recurrent::rnn_relu_packed, at::native::rnn_relu),
    UNDERSTUDY_ROW(8, "lstm_cell", recurrent::lstm_cell, at::native::lstm_cell),
    UNDERSTUDY_ROW(9, "gru_cell", recurrent::gru_cell, at::native::gru_cell),
    UNDERSTUDY_ROW(10, "_use_cudnn_ctc_loss", no_vendor_loss, ask_vendor_loss<kCudnn>),
    UNDERSTUDY_ROW(11, "_use_cudnn_ctc_loss.Tensor", no_vendor_loss_of_tensors,
                   ask_vendor_loss_of_tensors<kCudnn>),
    UNDERSTUDY_ROW(12, "_use_miopen_ctc_loss", no_vendor_loss, ask_vendor_loss<kMiopen>),
    UNDERSTUDY_ROW(13, "_use_miopen_ctc_loss.Tensor", no_vendor_loss_of_tensors,
                   ask_vendor_loss_of_tensors<kMiopen>),
    UNDERSTUDY_ROW(14, "dropout", dropout, at::native::dropout),
}};
#undef UNDERSTUDY_ROW

void register_table(torch::Library& library) {
  for (const Row& row : kTable) library.impl(row.name, row.kernel());
}

}  // namespace

std::vector<std::pair<const char*, uint64_t>> cpu_branches_used() {
  std::vector<std::pair<const char*, uint64_t>> used;
  for (size_t i = 0; i < kRows; i++) used.emplace_back(kTable[i].name, uses[i].load());
  return used;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { register_table(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { register_table(library); }
// Fake tensors of the virtual device carry CUDA's keys alone.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { register_table(library); }

}  // namespace understudy::client
