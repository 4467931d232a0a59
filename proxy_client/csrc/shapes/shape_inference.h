// Output shapes from C++ meta kernels, for calls whose shapes keep changing.
#pragma once
#include "proxy_client/csrc/shapes/shape_cache.h"

namespace understudy::client {

// Fills in results and resizes of `entry` by running the operator's shape kernel. False if it has none that
// applies. Raises what the kernel raises: shape errors come at the call, as on a real device.
bool infer_shapes(const c10::OperatorHandle& op, const OperatorInfo& info,
                  c10::ArrayRef<c10::IValue> arguments, CallTemplate& entry);

}  // namespace understudy::client
