#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "proxy_client/csrc/distributed/process_group.h"
#include "proxy_client/csrc/distributed/py_process_group.h"

namespace understudy::client {

void register_process_group(pybind11::module_ distributed) {
  namespace py = pybind11;
  using Options = ProcessGroupOptions;
  py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>> group(
      distributed, "_UnderstudyProcessGroup", py::dynamic_attr());
  const auto make = [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<Options> options) {
    const py::gil_scoped_release released;  // waits for rank 0
    return c10::make_intrusive<ProcessGroup>(store, rank, size, std::move(options));
  };
  group
      .def(py::init([make](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           std::chrono::milliseconds timeout) {
             auto options = c10::make_intrusive<Options>();
             options->timeout = timeout;
             return make(store, rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"))
      .def(py::init(make), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly("options", &ProcessGroup::options);
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(
      distributed, "_UnderstudyProcessGroupOptions", py::dynamic_attr())
      .def(py::init([](bool is_high_priority_stream) {
             auto options = c10::make_intrusive<Options>();
             options->is_high_priority_stream = is_high_priority_stream;
             return options;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_readwrite("split_color", &Options::split_color)
      .def_readwrite("group_desc", &Options::group_desc)
      .def("__copy__", [](const Options& options) { return c10::make_intrusive<Options>(options); })
      .def("__deepcopy__",
           [](const Options& options, const py::dict&) { return c10::make_intrusive<Options>(options); });
}

}  // namespace understudy::client
