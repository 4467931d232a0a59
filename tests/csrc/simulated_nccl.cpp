// For Python: a group of the simulated CUDA device around one that moves its bytes.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tests/csrc/simulated_cuda/process_group.h"

namespace py = pybind11;

PYBIND11_MODULE(simulated_nccl, m) {
  py::module_::import("torch.distributed");  // whose types these are
  using understudy::simulated::ProcessGroup;
  m.def("around", [](int rank, int size, py::object connect) -> c10::intrusive_ptr<c10d::Backend> {
    // Outlives the interpreter's last use of it, and is let go by threads that do not hold its lock.
    auto* const kept = new py::object(std::move(connect));
    return c10::make_intrusive<ProcessGroup>(rank, size, [kept] {
      const py::gil_scoped_acquire gil;
      return (*kept)().cast<ProcessGroup::Carrier>();
    });
  });
}
