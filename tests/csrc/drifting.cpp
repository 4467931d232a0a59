// An operator whose result depends on how often it was called: nothing that a log could replay.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {

at::Tensor drifting(const at::Tensor& x) {
  static int calls = 0;
  return x.mul(1.0 + 1e-3 * ++calls);
}

}  // namespace

TORCH_LIBRARY(understudy_drift, library) { library.def("drifting(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(understudy_drift, CPU, library) { library.impl("drifting", drifting); }
TORCH_LIBRARY_IMPL(understudy_drift, CUDA, library) { library.impl("drifting", drifting); }
