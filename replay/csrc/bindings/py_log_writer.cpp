// A writer for tests and tools; a worker's own is in proxy_client.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <vector>

#include "replay/csrc/bindings/py_bind.h"
#include "replay/csrc/log/log_writer.h"

namespace py = pybind11;
namespace understudy::replay {

void bind_log_writer(py::module_& m) {
  py::class_<LogWriter>(m, "LogWriter",
                        "Appends records to a log (tests; a worker's own writer is in proxy_client).")
      .def(py::init<const std::string&>())
      .def_property_readonly("usable", &LogWriter::usable)
      .def_property_readonly("records", &LogWriter::records)
      .def_property_readonly("bytes", &LogWriter::bytes)
      .def("free_later", &LogWriter::free_later)
      .def(
          "put_template",
          [](LogWriter& w, const std::string& name, const std::vector<uint64_t>& key,
             const std::vector<uint64_t>& out) {
            return w.put_template(name, key.data(), key.size(), out.data(), out.size());
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "append",
          [](LogWriter& w, uint16_t kind, uint64_t aux, const std::vector<uint64_t>& body) {
            return w.append(static_cast<Kind>(kind), aux, body.size(), [&](uint64_t* to) {
              if (!body.empty()) std::memcpy(to, body.data(), 8 * body.size());
            });
          },
          py::call_guard<py::gil_scoped_release>())
      .def("call",
           [](LogWriter& w, uint16_t kind, uint64_t aux, const std::vector<uint64_t>& body) {
             std::string payload;
             {
               py::gil_scoped_release release;
               w.call(
                   static_cast<Kind>(kind), aux, body.size(),
                   [&](uint64_t* to) {
                     if (!body.empty()) std::memcpy(to, body.data(), 8 * body.size());
                   },
                   [&](const uint8_t* data, size_t bytes) {
                     payload.assign(reinterpret_cast<const char*>(data), bytes);
                   });
             }
             return py::bytes(payload);
           })
      .def("close", &LogWriter::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace understudy::replay
