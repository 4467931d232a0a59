#include "recovery/snapshots/csrc/bindings/py_recorded_disk.h"

#include "recovery/snapshots/csrc/bindings/python_buffers.h"

namespace py = pybind11;
namespace understudy::persistence {
namespace {

const char* name_of(Happened what) {
  constexpr const char* kNames[] = {"write", "done", "sync", "synced", "sync-failed", "mark"};
  return kNames[static_cast<size_t>(what)];
}

py::bytes as_bytes(const std::vector<uint8_t>& data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

std::shared_ptr<RecordedDisk> disk_with(const py::object& content, bool ranges) {
  const BufferView view(content, false);
  return std::make_shared<RecordedDisk>(std::vector<uint8_t>(view.data(), view.data() + view.bytes()),
                                        ranges);
}

}  // namespace

void bind_recorded_disk(py::module_& m) {
  py::class_<RecordedDisk, std::shared_ptr<RecordedDisk>>(m, "RecordedDisk")
      .def(py::init(&disk_with), py::arg("content"), py::kw_only(), py::arg("ranges") = false)
      .def("fail", &RecordedDisk::fail, py::arg("operation"), py::arg("error"), py::arg("forever") = false)
      .def("ignore_syncs", &RecordedDisk::ignore_syncs, py::arg("begin"), py::arg("end"))
      .def("mark", &RecordedDisk::mark, py::arg("number"))
      .def("keep_log", &RecordedDisk::keep_log, py::arg("on"))
      .def_property_readonly("operations", &RecordedDisk::operations)
      .def("content", [](const RecordedDisk& disk) { return as_bytes(disk.content()); })
      .def("log", [](const RecordedDisk& disk) {
        py::list events;
        for (const DiskEvent& e : disk.log())
          events.append(py::make_tuple(name_of(e.what), e.number, e.offset, e.bytes, as_bytes(e.data)));
        return events;
      });
}

}  // namespace understudy::persistence
