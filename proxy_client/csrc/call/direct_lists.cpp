#include <ATen/Operators.h>

#include "proxy_client/csrc/call/direct_call.h"

namespace understudy::client {

void register_direct_lists(DirectRegistry& registry) {
  using namespace at::_ops;
  registry.add<cat, _foreach_add__Scalar, _foreach_add__List, _foreach_add_List, _foreach_add_Scalar,
               _foreach_sub__List, _foreach_mul__Scalar, _foreach_mul_Scalar, _foreach_mul__List,
               _foreach_mul__Tensor, _foreach_div__Scalar, _foreach_div__ScalarList, _foreach_div__List,
               _foreach_sqrt, _foreach_sqrt_, _foreach_neg, _foreach_reciprocal_, _foreach_zero_,
               _foreach_norm_Scalar, _foreach_lerp__Scalar, _foreach_addcmul__Scalar,
               _foreach_addcdiv__Scalar, _foreach_addcdiv__ScalarList, _foreach_maximum__List>();
}

}  // namespace understudy::client
