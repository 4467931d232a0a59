// Recurrent layers as CPU PyTorch computes them, for a driver that runs CPU kernels.
//
// PyTorch's own composites look at the device of their input: for "cuda" they take fused cells that exist on
// GPUs only, and multiply inputs step by step. Bits are equal only if the worker issues the operators that
// the CPU branch issues, in its order (gradients are summed in the order of the graph).
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

namespace understudy::client::recurrent {

using at::Tensor;
using at::TensorList;
using OneState = std::tuple<Tensor, Tensor>;           // outputs, last hidden states
using TwoStates = std::tuple<Tensor, Tensor, Tensor>;  // outputs, last hidden states, last cell states

TwoStates lstm(const Tensor& input, TensorList hidden, TensorList parameters, bool has_biases, int64_t layers,
               double dropout, bool train, bool bidirectional, bool batch_first);
TwoStates lstm_packed(const Tensor& data, const Tensor& batch_sizes, TensorList hidden, TensorList parameters,
                      bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional);

OneState gru(const Tensor& input, const Tensor& hidden, TensorList parameters, bool has_biases,
             int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first);
OneState gru_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hidden,
                    TensorList parameters, bool has_biases, int64_t layers, double dropout, bool train,
                    bool bidirectional);

OneState rnn_tanh(const Tensor& input, const Tensor& hidden, TensorList parameters, bool has_biases,
                  int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first);
OneState rnn_tanh_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hidden,
                         TensorList parameters, bool has_biases, int64_t layers, double dropout, bool train,
                         bool bidirectional);

OneState rnn_relu(const Tensor& input, const Tensor& hidden, TensorList parameters, bool has_biases,
                  int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first);
OneState rnn_relu_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hidden,
                         TensorList parameters, bool has_biases, int64_t layers, double dropout, bool train,
                         bool bidirectional);

OneState lstm_cell(const Tensor& input, TensorList hidden, const Tensor& input_weight,
                   const Tensor& hidden_weight, const std::optional<Tensor>& input_bias,
                   const std::optional<Tensor>& hidden_bias);
Tensor gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& input_weight,
                const Tensor& hidden_weight, const std::optional<Tensor>& input_bias,
                const std::optional<Tensor>& hidden_bias);

}  // namespace understudy::client::recurrent
