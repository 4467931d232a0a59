#include <ATen/Operators.h>

#include "proxy_client/csrc/call/direct_call.h"

namespace understudy::client {

void register_direct_elementwise(DirectRegistry& registry) {
  using namespace at::_ops;
  registry
      .add<add_Tensor, add__Tensor, sub_Tensor, sub__Tensor, mul_Tensor, mul__Tensor, div_Tensor, div__Tensor,
           neg, at::_ops::exp, at::_ops::log, at::_ops::sqrt, rsqrt, reciprocal, pow_Tensor_Scalar, sigmoid,
           sigmoid_backward, at::_ops::tanh, tanh_backward, relu, relu_, threshold_backward, gelu,
           gelu_backward, silu, silu_backward, maximum, minimum, clamp, where_self, eq_Tensor, eq_Scalar,
           ne_Tensor, ne_Scalar, lt_Tensor, lt_Scalar, gt_Tensor, gt_Scalar, addcmul, addcmul_, addcdiv,
           addcdiv_, lerp__Scalar, masked_fill__Scalar, zero_, fill__Scalar>();
}

}  // namespace understudy::client
