// replay._replay: a log as bytes, for who stores it and who lays a stored one out.
#include "replay/csrc/bindings/py_bind.h"

#include <pybind11/stl.h>

#include <cstring>
#include <string_view>

#include "replay/csrc/tools/log_copy.h"
#include "replay/csrc/tools/log_view.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

struct Copied {
  CommitView commit;
  std::vector<uint64_t> frees;
  py::bytes row, manifest;
};

template <class T>
py::bytes as_bytes(const std::vector<T>& content) {
  return {reinterpret_cast<const char*>(content.data()), content.size() * sizeof(T)};
}

py::bytes bytes_of(std::vector<uint8_t> (*copy)(const LogMap&, uint64_t, uint64_t), const LogMap& log,
                   uint64_t begin, uint64_t end) {
  std::vector<uint8_t> found;
  {
    py::gil_scoped_release release;
    found = copy(log, begin, end);
  }
  return as_bytes(found);
}

CommitView describe_row(const py::bytes& row) { return describe(decode_row(std::string_view(row))); }

}  // namespace

void bind_log_copy(py::module_& m) {
  py::class_<Copied>(m, "CopiedCommit")
      .def_readonly("commit", &Copied::commit)
      .def_readonly("frees", &Copied::frees)
      .def_readonly("row", &Copied::row)
      .def_readonly("manifest", &Copied::manifest);
  m.def(
      "copy_records",
      [](const LogMap& l, uint64_t begin, uint64_t end) { return bytes_of(copy_records, l, begin, end); },
      "Records of [begin, end); raises LogError if they are not there any more.");
  m.def(
      "copy_templates",
      [](const LogMap& l, uint64_t begin, uint64_t end) { return bytes_of(copy_templates, l, begin, end); },
      "The dictionary's bytes of [begin, end); raises LogError.");
  m.def(
      "copy_commit",
      [](const LogMap& l, uint64_t number) {
        CopiedCommit found = copy_commit(l, number);
        return Copied{describe(found.row), found.frees, as_bytes(encode_row(found.row)),
                      as_bytes(found.manifest)};
      },
      "A commit that is still in the ring, its frees and manifest; raises LogError.");
  m.def("describe_row", &describe_row, "A commit by its row on storage; raises LogError.");
  py::class_<LogFiller>(m, "LogFiller", "Fills a fresh log with what was copied of another one.")
      .def(py::init<LogMap&, uint64_t>(), py::keep_alive<1, 2>())
      .def("put_records",
           [](LogFiller& f, const py::bytes& content) {
             const std::string_view bytes(content);
             f.put_records(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
           })
      .def("put_templates",
           [](LogFiller& f, uint64_t id, const py::bytes& content) {
             const std::string_view bytes(content);
             f.put_templates(id, reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
           })
      .def("finish", &LogFiller::finish, py::arg("frees"), py::arg("index"),
           "A record that takes the commit there into effect, and nothing else; raises LogError.");
}

}  // namespace understudy::replay
