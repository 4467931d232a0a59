// Letting autograd's device threads finish before the interpreter goes away.
#pragma once

namespace understudy::client {

// After a backward pass, a device thread may still release Python objects. If the interpreter finalises
// meanwhile, taking the GIL ends that thread inside C++ and the process aborts. This waits until such work is
// done. Call it without the GIL.
void drain_autograd_threads();

}  // namespace understudy::client
