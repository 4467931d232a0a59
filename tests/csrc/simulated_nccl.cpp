// For Python: a group of the simulated CUDA device around one that moves its bytes.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tests/csrc/simulated_cuda/process_group.h"

namespace py = pybind11;

PYBIND11_MODULE(simulated_nccl, m) {
  py::module_::import("torch.distributed");  // whose types these are
  m.def("around", [](c10::intrusive_ptr<c10d::Backend> carrier) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<understudy::simulated::ProcessGroup>(std::move(carrier));
  });
}
