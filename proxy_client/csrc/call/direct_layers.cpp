#include <ATen/Operators.h>

#include "proxy_client/csrc/call/direct_call.h"

namespace understudy::client {

void register_direct_layers(DirectRegistry& registry) {
  using namespace at::_ops;
  registry.add<mm, bmm, addmm, baddbmm, convolution, convolution_backward, native_layer_norm,
               native_layer_norm_backward, native_batch_norm, native_batch_norm_backward, native_dropout,
               native_dropout_backward, max_pool2d_with_indices, max_pool2d_with_indices_backward,
               _adaptive_avg_pool2d, _adaptive_avg_pool2d_backward, _softmax, _softmax_backward_data,
               _log_softmax, _log_softmax_backward_data, nll_loss_forward, nll_loss_backward, mse_loss,
               mse_loss_backward, embedding_dense_backward, index_select, gather, sum_dim_IntList, mean_dim,
               argmax, cumsum, tril, triu, _scaled_dot_product_flash_attention_for_cpu,
               _scaled_dot_product_flash_attention_for_cpu_backward>();
}

}  // namespace understudy::client
