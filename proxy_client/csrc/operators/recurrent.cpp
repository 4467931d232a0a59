#include "proxy_client/csrc/operators/recurrent.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <vector>

namespace understudy::client::recurrent {
namespace {

constexpr int64_t kOneDnnLstm = 2;  // mode of mkldnn_rnn_layer

enum class Cell { kTanh, kRelu, kGru, kLstm };

// What a cell remembers: h, and for an LSTM c.
using States = std::vector<Tensor>;

// Of one layer in one direction. The projection is there only in an LSTM that has one.
struct Weights {
  Tensor input, hidden, input_bias, hidden_bias, projection;
  Tensor of_input(const Tensor& x) const { return at::linear(x, input, input_bias); }
  Tensor of_hidden(const Tensor& h) const { return at::linear(h, hidden, hidden_bias); }
};

struct Layers {
  Cell cell;
  std::vector<Weights> weights;  // layer by layer, in each the directions
  double dropout;
  bool bidirectional;
  size_t directions() const { return bidirectional ? 2 : 1; }
};

struct Outcome {
  Tensor outputs;
  std::vector<States> last;  // as the weights
};

States lstm_step(const Tensor& gates, const Tensor& c, const Weights& w) {
  const auto gate = gates.unsafe_chunk(4, 1);
  const Tensor in = gate[0].sigmoid_(), forget = gate[1].sigmoid_();
  const Tensor candidate = gate[2].tanh_(), out = gate[3].sigmoid_();
  const Tensor next_c = (forget * c).add_(in * candidate);
  Tensor next_h = out * next_c.tanh();
  if (w.projection.defined()) next_h = at::matmul(next_h, w.projection.t());
  return {next_h, next_c};
}

Tensor gru_step(const Tensor& from_input, const Tensor& h, const Weights& w) {
  const auto x = from_input.unsafe_chunk(3, 1);
  const auto r = w.of_hidden(h).unsafe_chunk(3, 1);
  const Tensor reset = r[0].add_(x[0]).sigmoid_();
  const Tensor keep = r[1].add_(x[1]).sigmoid_();
  const Tensor fresh = x[2].add(r[2].mul_(reset)).tanh_();
  return (h - fresh).mul_(keep).add_(fresh);
}

// `from_input` is what the input's weights make of this step's input.
States step(Cell cell, const Tensor& from_input, const States& states, const Weights& w) {
  switch (cell) {
    case Cell::kLstm:
      return lstm_step(w.of_hidden(states[0]).add_(from_input), states[1], w);
    case Cell::kGru:
      return {gru_step(from_input, states[0], w)};
    case Cell::kTanh:
      return {at::tanh(w.of_hidden(states[0]).add_(from_input))};
    case Cell::kRelu:
      return {at::relu(w.of_hidden(states[0]).add_(from_input))};
  }
  TORCH_INTERNAL_ASSERT(false, "unknown recurrent cell");
}

States narrow(const States& states, int64_t start, int64_t length) {
  States part;
  for (const Tensor& state : states) part.push_back(state.narrow(0, start, length));
  return part;
}

States concatenate(const std::vector<States>& parts) {
  States whole;
  for (size_t i = 0; i < parts[0].size(); i++) {
    std::vector<Tensor> same;
    for (const States& part : parts) same.push_back(part[i]);
    whole.push_back(at::cat(same, 0));
  }
  return whole;
}

struct Pass {
  Tensor outputs;
  States last;
};

// All sequences are equally long; time is the first dimension.
struct PaddedSequence {
  Pass run(const Tensor& input, Cell cell, States states, const Weights& w, bool backwards) const {
    auto steps = w.of_input(input).unbind(0);
    TORCH_CHECK(!steps.empty(), "Expected sequence length to be larger than 0 in RNN");
    if (backwards) std::reverse(steps.begin(), steps.end());
    std::vector<Tensor> outputs;
    for (const Tensor& x : steps) {
      states = step(cell, x, states, w);
      outputs.push_back(states[0]);
    }
    if (backwards) std::reverse(outputs.begin(), outputs.end());
    return {at::stack(outputs, 0), states};
  }
  static Tensor join(const Tensor& forwards, const Tensor& backwards) {
    return at::cat({forwards, backwards}, forwards.dim() - 1);
  }
};

// Sequences sorted by length, their steps one behind the other: how many still run at a step is its batch
// size.
struct PackedSequence {
  c10::ArrayRef<int64_t> batch_sizes;

  Pass run(const Tensor& input, Cell cell, const States& states, const Weights& w, bool backwards) const {
    const Tensor from_input = w.of_input(input);
    return backwards ? run_backwards(from_input, cell, states, w) : run_forwards(from_input, cell, states, w);
  }

  Pass run_forwards(const Tensor& from_input, Cell cell, States states, const Weights& w) const {
    std::vector<Tensor> outputs;
    std::vector<States> ended;
    int64_t offset = 0, running = batch_sizes[0];
    for (const int64_t size : batch_sizes) {
      const Tensor x = from_input.narrow(0, offset, size);
      offset += size;
      if (size < running) {
        ended.push_back(narrow(states, size, running - size));
        states = narrow(states, 0, size);
      }
      running = size;
      states = step(cell, x, states, w);
      outputs.push_back(states[0]);
    }
    ended.push_back(states);
    std::reverse(ended.begin(), ended.end());
    Tensor whole = at::cat(outputs, 0);
    return {whole, concatenate(ended)};
  }

  Pass run_backwards(const Tensor& from_input, Cell cell, const States& initial, const Weights& w) const {
    std::vector<Tensor> outputs;
    int64_t offset = from_input.size(0), running = batch_sizes.back();
    States states = narrow(initial, 0, running);
    for (size_t i = batch_sizes.size(); i-- > 0;) {
      const int64_t size = batch_sizes[i];
      if (size > running) states = concatenate({states, narrow(initial, running, size - running)});
      const Tensor x = from_input.narrow(0, offset - size, size);
      offset -= size;
      running = size;
      states = step(cell, x, states, w);
      outputs.push_back(states[0]);
    }
    std::reverse(outputs.begin(), outputs.end());
    return {at::cat(outputs, 0), states};
  }
  static Tensor join(const Tensor& forwards, const Tensor& backwards) {
    return at::cat({forwards, backwards}, -1);
  }
};

template <class Sequence>
Outcome run_layers(const Sequence& sequence, Tensor input, const std::vector<States>& initial,
                   const Layers& layers) {
  const size_t directions = layers.directions(), count = layers.weights.size();
  TORCH_CHECK(initial.size() == count, "Expected more hidden states in stacked_rnn");
  Outcome result;
  for (size_t i = 0; i < count; i += directions) {
    Pass forwards = sequence.run(input, layers.cell, initial[i], layers.weights[i], false);
    result.last.push_back(forwards.last);
    if (layers.bidirectional) {
      Pass backwards = sequence.run(input, layers.cell, initial[i + 1], layers.weights[i + 1], true);
      result.last.push_back(backwards.last);
      input = Sequence::join(forwards.outputs, backwards.outputs);
    } else {
      input = forwards.outputs;
    }
    if (layers.dropout != 0 && i + directions < count) input = at::dropout(input, layers.dropout, true);
  }
  result.outputs = input;
  return result;
}

Layers make_layers(Cell cell, TensorList parameters, bool has_biases, bool has_projections, int64_t layers,
                   double dropout, bool train, bool bidirectional) {
  Layers made{cell, {}, train ? dropout : 0, bidirectional};
  const size_t each = 2 + (has_biases ? 2 : 0) + (has_projections ? 1 : 0);
  const size_t count = static_cast<size_t>(layers) * made.directions();
  TORCH_CHECK(parameters.size() == each * count, "got an incorrect number of RNN parameters");
  for (size_t i = 0; i < count; i++) {
    const auto mine = parameters.slice(i * each, each);
    Weights w{mine[0], mine[1], {}, {}, {}};
    if (has_biases) w.input_bias = mine[2], w.hidden_bias = mine[3];
    if (has_projections) w.projection = mine[each - 1];
    made.weights.push_back(w);
  }
  return made;
}

void check_alike(const Tensor& input, TensorList others, const char* what) {
  for (const Tensor& other : others) {
    if (!other.defined()) continue;
    TORCH_CHECK(input.device() == other.device(), "Input and ", what,
                " tensors are not at the same device, found input tensor at ", input.device(), " and ", what,
                " tensor at ", other.device());
    TORCH_CHECK(input.dtype() == other.dtype(), "Input and ", what,
                " tensors are not the same dtype, found input tensor with ", input.dtype(), " and ", what,
                " tensor with ", other.dtype());
  }
}

std::vector<States> per_layer(TensorList hidden) {
  std::vector<States> states;
  for (const Tensor& kind : hidden) {
    const auto layers = kind.unbind(0);
    states.resize(std::max(states.size(), layers.size()));
    for (size_t i = 0; i < layers.size(); i++) states[i].push_back(layers[i]);
  }
  return states;
}

Tensor stack_last(const Outcome& outcome, size_t kind) {
  std::vector<Tensor> same;
  for (const States& states : outcome.last) same.push_back(states[kind]);
  return at::stack(same, 0);
}

c10::ArrayRef<int64_t> sizes_of(const Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.is_cpu() && batch_sizes.scalar_type() == at::kLong && batch_sizes.numel() > 0,
              "batch_sizes of a packed sequence must be a CPU tensor of int64 that is not empty");
  return {batch_sizes.const_data_ptr<int64_t>(), static_cast<size_t>(batch_sizes.numel())};
}

bool all_equal(c10::ArrayRef<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == sizes.front(); });
}

OneState run_padded(Cell cell, const Tensor& given, const Tensor& hidden, TensorList parameters,
                    bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional,
                    bool batch_first) {
  check_alike(given, hidden, "hidden");
  check_alike(given, parameters, "parameter");
  const Tensor input = batch_first ? given.transpose(0, 1) : given;
  Outcome outcome =
      run_layers(PaddedSequence{}, input, per_layer(hidden),
                 make_layers(cell, parameters, has_biases, false, layers, dropout, train, bidirectional));
  const Tensor last = stack_last(outcome, 0);
  if (batch_first) outcome.outputs.transpose_(0, 1);
  return {outcome.outputs, last};
}

OneState run_packed(Cell cell, const Tensor& data, const Tensor& batch_sizes, const Tensor& hidden,
                    TensorList parameters, bool has_biases, int64_t layers, double dropout, bool train,
                    bool bidirectional) {
  const Outcome outcome =
      run_layers(PackedSequence{sizes_of(batch_sizes)}, data, per_layer(hidden),
                 make_layers(cell, parameters, has_biases, false, layers, dropout, train, bidirectional));
  return {outcome.outputs, stack_last(outcome, 0)};
}

bool one_dnn_supports(const char* type) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string("mkldnn::_is_mkldnn_") + type, ""});
  if (!op) return false;
  torch::jit::Stack stack;
  op->callBoxed(&stack);
  return stack.back().toBool();
}

// As at::native::use_mkldnn() decides. The worker's processor is the server's: both are on one host.
bool takes_one_dnn(const Tensor& input) {
  if (!at::globalContext().userEnabledMkldnn() || input.sym_numel() == 0) return false;
  switch (input.scalar_type()) {
    case at::kFloat:
      return true;
    case at::kBFloat16: {
      static const bool supported = one_dnn_supports("bf16_supported");
      return supported;
    }
    case at::kHalf: {
      static const bool supported = one_dnn_supports("fp16_supported");
      return supported && !at::GradMode::is_enabled();
    }
    default:
      return false;
  }
}

// oneDNN has whole layers; how they are stacked is PyTorch's. Its kernel takes another algorithm where
// gradients are not recorded, which the server cannot see: `train`, which the kernel ignores, tells it.
TwoStates one_dnn_lstm(const Tensor& given, TensorList hidden, TensorList parameters, bool has_biases,
                       int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  Tensor input = (batch_first ? given.transpose(0, 1) : given).contiguous();
  const Tensor h = hidden[0].contiguous(), c = hidden[1].contiguous();
  const Layers all =
      make_layers(Cell::kLstm, parameters, has_biases, false, layers, dropout, train, bidirectional);
  const int64_t hidden_size = h.sym_size(2).guard_int(__FILE__, __LINE__);
  std::vector<Tensor> last_h, last_c;
  for (size_t i = 0; i < all.weights.size(); i += all.directions()) {
    std::vector<Tensor> outputs;
    for (size_t k = i; k < i + all.directions(); k++) {
      const Weights& w = all.weights[k];
      const auto bias = [&](const Tensor& given_bias, const Tensor& weight) {
        return has_biases ? given_bias : at::zeros_symint(weight.sym_sizes(), weight.options());
      };
      const auto index = static_cast<int64_t>(k);
      auto [y, hy, cy, workspace] = at::mkldnn_rnn_layer(
          input, w.input, w.hidden, bias(w.input_bias, w.input), bias(w.hidden_bias, w.hidden), h[index],
          c[index], /*reverse=*/k != i, /*batch_sizes=*/{}, kOneDnnLstm, hidden_size, layers, has_biases,
          bidirectional, batch_first, /*train=*/at::GradMode::is_enabled());
      outputs.push_back(y);
      last_h.push_back(hy);
      last_c.push_back(cy);
    }
    input = outputs.size() == 1 ? outputs[0] : at::cat(outputs, -1);
    if (all.dropout != 0 && i + all.directions() < all.weights.size())
      input = at::dropout(input, all.dropout, true);
  }
  const Tensor hy = at::stack(last_h, 0), cy = at::stack(last_c, 0);
  return {batch_first ? input.transpose(0, 1) : input, hy, cy};
}

void check_lstm_states(TensorList hidden, int64_t layers, bool bidirectional) {
  TORCH_CHECK(hidden.size() == 2, "lstm expects two hidden states");
  const int64_t expected = layers * (bidirectional ? 2 : 1);
  for (const char* name : {"h_0", "c_0"}) {
    const Tensor& state = hidden[name[0] == 'h' ? 0 : 1];
    TORCH_CHECK(state.dim() == 3, "For batched 3-D input, hx[", name[0] == 'h' ? 0 : 1, "] (", name,
                ") should be 3-D but got ", state.dim(), "-D tensor");
    TORCH_CHECK(state.sym_size(0) == expected, "Expected ", name, " size(0) to be ", expected,
                " (num_layers * num_directions), but got ", state.sym_size(0));
  }
}

void check_cell(const Tensor& input, TensorList hidden, const Tensor& input_weight,
                const Tensor& hidden_weight, int64_t gates) {
  const c10::SymInt width = hidden_weight.sym_size(1);
  TORCH_CHECK(input.sym_size(1) == input_weight.sym_size(1), "input has inconsistent input_size: got ",
              input.sym_size(1), " expected ", input_weight.sym_size(1));
  for (size_t i = 0; i < hidden.size(); i++) {
    TORCH_CHECK(input.sym_size(0) == hidden[i].sym_size(0), "Input batch size ", input.sym_size(0),
                " doesn't match hidden", i, " batch size ", hidden[i].sym_size(0));
    TORCH_CHECK(hidden[i].sym_size(1) == width, "hidden", i, " has inconsistent hidden_size: got ",
                hidden[i].sym_size(1), ", expected ", width);
  }
  TORCH_CHECK(input_weight.sym_size(0) == gates * width, "weight_ih first dim must be ", gates,
              " * hidden_size = ", gates * width, ", but got ", input_weight.sym_size(0));
  TORCH_CHECK(hidden_weight.sym_size(0) == gates * width, "weight_hh first dim must be ", gates,
              " * hidden_size = ", gates * width, ", but got ", hidden_weight.sym_size(0));
}

}  // namespace

TwoStates lstm(const Tensor& given, TensorList hidden, TensorList parameters, bool has_biases, int64_t layers,
               double dropout, bool train, bool bidirectional, bool batch_first) {
  check_lstm_states(hidden, layers, bidirectional);
  const bool has_projections = hidden[0].sym_size(2) != hidden[1].sym_size(2);
  if (takes_one_dnn(given) && !has_projections)
    return one_dnn_lstm(given, hidden, parameters, has_biases, layers, dropout, train, bidirectional,
                        batch_first);
  check_alike(given, hidden, "hidden");
  check_alike(given, parameters, "parameter");
  const Tensor input = batch_first ? given.transpose(0, 1) : given;
  const Outcome outcome = run_layers(PaddedSequence{}, input, per_layer(hidden),
                                     make_layers(Cell::kLstm, parameters, has_biases, has_projections, layers,
                                                 dropout, train, bidirectional));
  const Tensor h = stack_last(outcome, 0), c = stack_last(outcome, 1);
  return {batch_first ? outcome.outputs.transpose(0, 1) : outcome.outputs, h, c};
}

TwoStates lstm_packed(const Tensor& data, const Tensor& batch_sizes, TensorList hidden, TensorList parameters,
                      bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  check_lstm_states(hidden, layers, bidirectional);
  const bool has_projections = hidden[0].sym_size(2) != hidden[1].sym_size(2);
  const auto sizes = sizes_of(batch_sizes);
  // Sequences of one length are unpacked where oneDNN takes them.
  if (takes_one_dnn(data) && !has_projections && all_equal(sizes)) {
    const auto steps = static_cast<int64_t>(sizes.size());
    const Tensor padded = data.reshape({steps, sizes.front(), data.size(-1)});
    auto [outputs, h, c] = one_dnn_lstm(padded, hidden, parameters, has_biases, layers, dropout, train,
                                        bidirectional, /*batch_first=*/false);
    return {outputs.reshape({steps * sizes.front(), outputs.size(-1)}), h, c};
  }
  const Outcome outcome = run_layers(PackedSequence{sizes}, data, per_layer(hidden),
                                     make_layers(Cell::kLstm, parameters, has_biases, has_projections, layers,
                                                 dropout, train, bidirectional));
  const Tensor h = stack_last(outcome, 0), c = stack_last(outcome, 1);
  return {outcome.outputs, h, c};
}

#define UNDERSTUDY_ONE_STATE(NAME, CELL)                                                                     \
  OneState NAME(const Tensor& input, const Tensor& hidden, TensorList parameters, bool has_biases,           \
                int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {          \
    return run_padded(CELL, input, hidden, parameters, has_biases, layers, dropout, train, bidirectional,    \
                      batch_first);                                                                          \
  }                                                                                                          \
  OneState NAME##_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hidden,                \
                         TensorList parameters, bool has_biases, int64_t layers, double dropout, bool train, \
                         bool bidirectional) {                                                               \
    return run_packed(CELL, data, batch_sizes, hidden, parameters, has_biases, layers, dropout, train,       \
                      bidirectional);                                                                        \
  }
UNDERSTUDY_ONE_STATE(gru, Cell::kGru)
UNDERSTUDY_ONE_STATE(rnn_tanh, Cell::kTanh)
UNDERSTUDY_ONE_STATE(rnn_relu, Cell::kRelu)
#undef UNDERSTUDY_ONE_STATE

OneState lstm_cell(const Tensor& input, TensorList hidden, const Tensor& input_weight,
                   const Tensor& hidden_weight, const std::optional<Tensor>& input_bias,
                   const std::optional<Tensor>& hidden_bias) {
  TORCH_CHECK(hidden.size() == 2, "lstm_cell expects two hidden states");
  check_cell(input, hidden, input_weight, hidden_weight, 4);
  const Weights w{
      input_weight, hidden_weight, input_bias.value_or(Tensor()), hidden_bias.value_or(Tensor()), {}};
  const Tensor from_hidden = w.of_hidden(hidden[0]);  // before the input's: the order of the graph
  const States states = lstm_step(from_hidden.add_(w.of_input(input)), hidden[1], w);
  return {states[0], states[1]};
}

Tensor gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& input_weight,
                const Tensor& hidden_weight, const std::optional<Tensor>& input_bias,
                const std::optional<Tensor>& hidden_bias) {
  check_cell(input, hidden, input_weight, hidden_weight, 3);
  const Weights w{
      input_weight, hidden_weight, input_bias.value_or(Tensor()), hidden_bias.value_or(Tensor()), {}};
  return gru_step(w.of_input(input), hidden, w);
}

}  // namespace understudy::client::recurrent
