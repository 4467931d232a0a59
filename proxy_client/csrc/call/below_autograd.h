// What the client does by itself with tensors lies below autograd and autocast.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>

namespace understudy::client {

struct BelowAutograd {
  at::AutoDispatchBelowAutograd autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

}  // namespace understudy::client
