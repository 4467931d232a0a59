#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "proxy_client/csrc/process_group.h"
#include "proxy_client/csrc/py_process_group.h"

namespace understudy::client {

void register_process_group(pybind11::module_ distributed) {
  namespace py = pybind11;
  py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>>(
      distributed, "_UnderstudyProcessGroup", py::dynamic_attr())
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout) {
             const py::gil_scoped_release released;  // waits for rank 0
             return c10::make_intrusive<ProcessGroup>(store, rank, size, timeout);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"));
}

}  // namespace understudy::client
