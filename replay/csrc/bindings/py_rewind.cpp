// The rewind rules over byte strings, for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "replay/csrc/bindings/py_bind.h"
#include "replay/csrc/rewind/rewind.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

struct ByteStore {
  uint64_t room = ~0ull;
  bool fails = false;
  std::string copy(const std::string& s) {
    if (fails) throw std::bad_alloc();
    if (s.size() > room) throw NoRoom("no room for a copy");
    return s;
  }
  void bring_back(std::string& now, std::string&& kept) { now = std::move(kept); }
  std::string hollow(const std::string& s) { return std::string(s.size(), '?'); }
  void recycle(std::string&&) {}
  uint64_t bytes(const std::string& s) { return s.size(); }
};

struct ByteTable {
  ByteStore store;
  BufferTable<std::string, ByteStore> table{store};
};

}  // namespace

void bind_rewind(py::module_& m) {
  py::register_exception<RewindError>(m, "RewindError", PyExc_RuntimeError);
  py::class_<ByteTable>(m, "ByteTable", "The rewind rules of the device server over byte strings.")
      .def(py::init<>())
      .def("protect", [](ByteTable& t, bool on) { t.table.protect(on); })
      .def("preimages", [](ByteTable& t, bool on) { t.table.preimages(on); })
      .def("fail_copies", [](ByteTable& t, bool on) { t.store.fails = on; })
      .def("limit_copies", [](ByteTable& t, uint64_t bytes) { t.store.room = bytes; })
      .def("create", [](ByteTable& t, uint64_t h, const py::bytes& c) { t.table.create(h, std::string(c)); })
      .def("write",
           [](ByteTable& t, uint64_t h, const py::bytes& c) { t.table.write(h).content = std::string(c); })
      .def("replace",
           [](ByteTable& t, uint64_t h, const py::bytes& c) { t.table.replace(h, std::string(c)); })
      .def("read", [](ByteTable& t, uint64_t h) { return py::bytes(t.table.read(h).content); })
      .def("free", [](ByteTable& t, uint64_t h) { t.table.free(h); })
      .def("commit", [](ByteTable& t) { return t.table.commit(); })
      .def("release", [](ByteTable& t, uint64_t floor) { t.table.release(floor); })
      .def("seal", [](ByteTable& t) { t.table.seal(); })
      .def("rewind", [](ByteTable& t, uint64_t target) { return t.table.rewind(target); })
      .def("start_at", [](ByteTable& t, uint64_t number) { t.table.start_at(number); })
      .def("adopt", [](ByteTable& t, uint64_t h, const py::bytes& c,
                       bool available) { t.table.adopt(h, std::string(c), available); })
      .def("rows",
           [](ByteTable& t) {
             std::vector<std::tuple<uint64_t, py::bytes, uint64_t, bool>> rows;
             for (auto& [h, b] : t.table.buffers())
               rows.emplace_back(h, py::bytes(b.content), b.born, b.available);
             return rows;
           })
      .def("handles",
           [](ByteTable& t) {
             std::vector<uint64_t> handles;
             for (auto& [h, b] : t.table.buffers()) handles.push_back(h);
             return handles;
           })
      .def_property_readonly("epoch", [](ByteTable& t) { return t.table.epoch(); })
      .def_property_readonly("oldest", [](ByteTable& t) { return t.table.oldest(); })
      .def_property_readonly("undo_bytes", [](ByteTable& t) { return t.table.undo_bytes(); })
      .def_property_readonly("live_bytes", [](ByteTable& t) { return t.table.live_bytes(); });
}

}  // namespace understudy::replay
