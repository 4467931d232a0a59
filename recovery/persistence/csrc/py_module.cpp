// The module recovery.persistence._store.  No PyTorch.  _store.pyi documents it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cmath>
#include <filesystem>

#include "recovery/persistence/csrc/py_recorded_disk.h"
#include "recovery/persistence/csrc/python_buffers.h"
#include "recovery/persistence/csrc/store_files.h"

namespace py = pybind11;
namespace understudy::persistence {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// What open() answers: a store, and what its engine had to say.
struct OpenedStore {
  std::shared_ptr<Store> store;
  std::string notes;
};

Engine engine_of(const std::string& name) {
  constexpr std::pair<const char*, Engine> kEngines[] = {
      {"auto", Engine::kAuto},         {"uring", Engine::kUring}, {"direct", Engine::kDirect},
      {"buffered", Engine::kBuffered}, {"mmap", Engine::kMmap},   {"dax", Engine::kDax}};
  for (const auto& [known, engine] : kEngines)
    if (name == known) return engine;
  throw StoreError("there is no engine \"" + name + "\": auto, uring, direct, buffered, mmap and dax");
}

// What is asked for in bytes becomes whole blocks.
Geometry geometry_of(uint32_t slots, uint64_t slot_bytes, uint64_t chunk_bytes) {
  if (slot_bytes > (1ull << 60)) throw StoreError("no store is so large");
  return {slots, rounded_up(slot_bytes, kBlock), chunk_bytes};
}

uint64_t deadline_in(double seconds) {
  if (std::isnan(seconds)) throw StoreError("a timeout is a number of seconds");
  constexpr double kLongest = 1e9;
  const double bounded = std::min(std::max(seconds, 0.0), kLongest);
  return replay::now_ns() + static_cast<uint64_t>(bounded * 1e9);
}

// A worker may call its job anything, and a damaged store, too.
py::str as_text(const char* text, size_t bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(bytes), "replace"));
}

// Memory that somebody else may take back: he is asked at the end.
class ConfirmedSource final : public GatherSource {
 public:
  ConfirmedSource(std::vector<Piece> pieces, py::object still_there)
      : GatherSource(std::move(pieces)), still_there_(std::move(still_there)) {}
  void confirm() const override {
    const py::gil_scoped_acquire locked;
    if (!still_there_.is_none() && !still_there_().cast<bool>())
      throw StoreError("the snapshot was given up in host memory while it was written");
  }

 private:
  const py::object still_there_;
};

Receipt persist(const OpenedStore& s, const std::string& job, uint32_t rank, uint32_t world, uint64_t step,
                uint64_t serial, const py::sequence& described, uint32_t threads, double timeout_s,
                const py::object& confirm) {
  std::vector<Extent> extents;
  std::vector<BufferView> views;
  views.reserve(described.size());
  extents.reserve(described.size());
  for (const py::handle item : described) {
    const auto [kind, id, buffer] = item.cast<std::tuple<uint32_t, uint64_t, py::object>>();
    views.emplace_back(buffer, false);
    extents.push_back({kind, 0, id, views.back().bytes(), 0});
  }
  Store::lay_out(extents);
  std::vector<GatherSource::Piece> pieces;
  pieces.reserve(extents.size());
  for (size_t i = 0; i < extents.size(); i++)
    pieces.push_back({views[i].data(), extents[i].bytes, extents[i].offset});
  const ConfirmedSource source(std::move(pieces), confirm);
  const uint64_t deadline = deadline_in(timeout_s);
  const py::gil_scoped_release unlocked;
  return s.store->persist({job, rank, world, step, serial}, extents, source, threads, deadline);
}

void read(const OpenedStore& s, uint64_t sequence, uint64_t index, const py::object& into) {
  const BufferView view(into, true);
  const py::gil_scoped_release unlocked;
  s.store->read(sequence, index, view.data(), view.bytes());
}

void read_all(const OpenedStore& s, uint64_t sequence, const py::sequence& into) {
  std::vector<BufferView> views;
  std::vector<Piece> pieces;
  views.reserve(into.size());
  pieces.reserve(into.size());
  for (const py::handle buffer : into) {
    const BufferView& view = views.emplace_back(buffer, true);
    pieces.push_back({0, view.data(), view.bytes()});
  }
  const py::gil_scoped_release unlocked;
  s.store->read_all(sequence, std::move(pieces));
}

std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> extents(const OpenedStore& s, uint64_t sequence) {
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> found;
  for (const Extent& e : s.store->extents(sequence)) found.emplace_back(e.kind, e.id, e.bytes);
  return found;
}

void read_range(const OpenedStore& s, uint64_t sequence, uint64_t offset, const py::object& into) {
  const BufferView view(into, true);
  const py::gil_scoped_release unlocked;
  s.store->read_range(sequence, offset, view.data(), view.bytes());
}

std::vector<std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>> layout(const OpenedStore& s,
                                                                       uint64_t sequence) {
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>> found;
  for (const Extent& e : s.store->extents(sequence)) found.emplace_back(e.kind, e.id, e.bytes, e.offset);
  return found;
}

template <class T, class Value>
void header_field(py::class_<Entry>& entry, const char* name, Value SlotHeader::* field) {
  entry.def_property_readonly(name,
                              [field](const Entry& e) { return e.header ? T((*e.header).*field) : T(0); });
}

void bind_entry(py::module_& m) {
  py::class_<Entry> entry(m, "Entry");
  entry.def_property_readonly("sequence", [](const Entry& e) { return e.registered.sequence; })
      .def_property_readonly("serial", [](const Entry& e) { return e.registered.serial; })
      .def_readonly("slot", &Entry::slot)
      .def_property_readonly("valid_header", [](const Entry& e) { return e.header.has_value(); })
      .def_property_readonly(
          "job",
          [](const Entry& e) { return e.header ? as_text(e.header->job, e.header->job_bytes) : py::str(""); })
      .def("__repr__", [](const Entry& e) {
        return "<snapshot " + std::to_string(e.registered.sequence) + " in slot " + std::to_string(e.slot) +
               ", serial " + std::to_string(e.registered.serial) + (e.header ? ">" : ", damaged header>");
      });
  header_field<uint32_t>(entry, "rank", &SlotHeader::rank);
  header_field<uint32_t>(entry, "world", &SlotHeader::world);
  header_field<uint64_t>(entry, "step", &SlotHeader::step);
  header_field<uint64_t>(entry, "bytes", &SlotHeader::payload_bytes);
  header_field<uint64_t>(entry, "time_ns", &SlotHeader::time_ns);
}

void bind_receipt(py::module_& m) {
  py::class_<Receipt>(m, "Receipt")
      .def_readonly("sequence", &Receipt::sequence)
      .def_readonly("slot", &Receipt::slot)
      .def_readonly("bytes", &Receipt::bytes)
      .def_readonly("seconds", &Receipt::seconds)
      .def_readonly("stalled_seconds", &Receipt::stalled_seconds)
      .def_readonly("registered", &Receipt::registered)
      .def("__repr__", [](const Receipt& r) {
        return "<receipt of snapshot " + std::to_string(r.sequence) + " in slot " + std::to_string(r.slot) +
               (r.registered ? ">" : ", below the floor>");
      });
}

void bind_store(py::module_& m) {
  py::class_<OpenedStore> store(m, "Store");
  store
      .def_static(
          "create",
          [](const std::filesystem::path& path, uint32_t slots, uint64_t slot_bytes, uint64_t chunk_bytes) {
            create_store(path, geometry_of(slots, slot_bytes, chunk_bytes));
          },
          py::arg("path"), py::kw_only(), py::arg("slots"), py::arg("slot_bytes"),
          py::arg("chunk_bytes") = 4ull << 20, Unlocked())
      .def_static(
          "open",
          [](const std::filesystem::path& path, const std::string& engine, bool writable,
             uint64_t pool_bytes) {
            OpenedStore opened;
            opened.store = open_store(path, engine_of(engine), {writable, true, pool_bytes}, &opened.notes);
            return opened;
          },
          py::arg("path"), py::kw_only(), py::arg("engine") = "auto", py::arg("writable") = true,
          py::arg("pool_bytes") = 64ull << 20, Unlocked())
      .def_static("needed_slot_bytes", &Store::needed_slot_bytes, py::arg("extents"), py::kw_only(),
                  py::arg("chunk_bytes") = 4ull << 20)
      .def_static(
          "create_on",
          [](const std::shared_ptr<RecordedDisk>& disk, uint32_t slots, uint64_t slot_bytes,
             uint64_t chunk_bytes) {
            RecordedStorage storage(disk, 1);
            Store::format(storage, geometry_of(slots, slot_bytes, chunk_bytes));
          },
          py::arg("disk"), py::kw_only(), py::arg("slots"), py::arg("slot_bytes"), py::arg("chunk_bytes"))
      .def_static(
          "open_on",
          [](const std::shared_ptr<RecordedDisk>& disk, bool writable, uint64_t pool_bytes, uint32_t depth) {
            OpenedStore opened;
            opened.store = std::make_shared<Store>(std::make_unique<RecordedStorage>(disk, depth),
                                                   StoreOptions{writable, true, pool_bytes});
            opened.notes = opened.store->note();
            return opened;
          },
          py::arg("disk"), py::kw_only(), py::arg("writable") = true, py::arg("pool_bytes") = 64ull << 20,
          py::arg("depth") = 3);
  store
      .def("persist", &persist, py::kw_only(), py::arg("job"), py::arg("rank"), py::arg("world"),
           py::arg("step"), py::arg("serial"), py::arg("extents"), py::arg("threads") = 2,
           py::arg("timeout_s"), py::arg("confirm") = py::none())
      .def(
          "release_before", [](const OpenedStore& s, uint64_t serial) { s.store->release_before(serial); },
          py::arg("serial"), Unlocked())
      .def(
          "discard", [](const OpenedStore& s, uint64_t serial) { s.store->discard(serial); },
          py::arg("serial"), Unlocked())
      .def(
          "snapshots", [](const OpenedStore& s) { return s.store->snapshots(); }, Unlocked())
      .def("extents", &extents, py::arg("sequence"), Unlocked())
      .def("read", &read, py::arg("sequence"), py::arg("index_of_extent"), py::arg("into"))
      .def("read_all", &read_all, py::arg("sequence"), py::arg("into"))
      .def("layout", &layout, py::arg("sequence"), Unlocked())
      .def("read_range", &read_range, py::arg("sequence"), py::arg("offset"), py::arg("into"))
      .def(
          "verify", [](const OpenedStore& s, uint64_t sequence) { return s.store->verify(sequence); },
          py::arg("sequence"), Unlocked())
      .def(
          "close", [](const OpenedStore& s) { s.store->close(); }, Unlocked())
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](const OpenedStore& s, const py::args&) {
        const py::gil_scoped_release unlocked;
        s.store->close();
      });
  store.def_property_readonly("capacity", [](const OpenedStore& s) { return s.store->geometry().slots; })
      .def_property_readonly("slot_bytes",
                             [](const OpenedStore& s) { return s.store->geometry().slot_bytes; })
      .def_property_readonly("chunk_bytes",
                             [](const OpenedStore& s) { return s.store->geometry().chunk_bytes; })
      .def_property_readonly("free_slots", [](const OpenedStore& s) { return s.store->free_slots(); })
      .def_property_readonly("epoch", [](const OpenedStore& s) { return s.store->registry().epoch; })
      .def_property_readonly("floor", [](const OpenedStore& s) { return s.store->registry().floor; })
      .def_property_readonly("engine", [](const OpenedStore& s) { return s.store->engine(); })
      .def_property_readonly("notes", [](const OpenedStore& s) { return s.notes; })
      .def_property_readonly("uuid", [](const OpenedStore& s) {
        const Uuid& uuid = s.store->uuid();
        return py::bytes(reinterpret_cast<const char*>(uuid.data()), uuid.size());
      });
}

}  // namespace

PYBIND11_MODULE(_store, m) {
  const py::object store_error = py::register_exception<StoreError>(m, "StoreError", PyExc_ValueError);
  py::register_exception<StoreFull>(m, "StoreFull", store_error);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const StorageError& e) {
      const py::tuple args = py::make_tuple(e.code().value(), e.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());  // becomes PermissionError, … by its number
    }
  });
  bind_recorded_disk(m);
  bind_receipt(m);
  bind_entry(m);
  bind_store(m);
}

}  // namespace understudy::persistence
