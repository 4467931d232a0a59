// The module recovery.snapshots._store.  No PyTorch.  _store.pyi documents it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <unordered_set>

#include "recovery/snapshots/csrc/bindings/py_recorded_disk.h"
#include "recovery/snapshots/csrc/bindings/python_buffers.h"
#include "recovery/snapshots/csrc/store/store_files.h"
#include "replay/csrc/rewind/manifest.h"

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

// Contents, and the Python objects whose memory they are.
class HeldContents final : public Contents {
 public:
  HeldContents(std::vector<BufferView> views, const std::vector<LooseContent>& loose, const ContentArea& area,
               std::vector<AreaContent> rows)
      : Contents(loose, area, std::move(rows)), views_(std::move(views)) {}

 private:
  const std::vector<BufferView> views_;
};

// The area may be taken back by somebody else: he is asked at the end.
class ConfirmedContents final : public Contents {
 public:
  ConfirmedContents(const Contents& contents, py::object still_there)
      : Contents(contents), still_there_(std::move(still_there)) {}
  void confirm() const override {
    const py::gil_scoped_acquire locked;
    if (!still_there_.is_none() && !still_there_().cast<bool>())
      throw StoreError("the snapshot was given up in host memory while it was written");
  }

 private:
  const py::object still_there_;
};

// Rows of a manifest (replay/csrc/log/log_format.h), which say what an area has: those whose handles are not
// `elsewhere`.
std::vector<AreaContent> rows_of(const BufferView& manifest, const std::vector<uint64_t>& elsewhere) {
  replay::ManifestHeader header{};
  if (manifest.bytes() < sizeof header) throw StoreError("a manifest is too short");
  std::memcpy(&header, manifest.data(), sizeof header);
  replay::CommitEntry commit{};
  commit.number = header.commit;
  commit.manifest_bytes = manifest.bytes();
  const replay::Area itself{manifest.data(), ~0ull, "snapshot area"};  // Contents knows how large that is
  const replay::Manifest found = replay::Manifest::read(itself, commit);
  const std::unordered_set<uint64_t> without(elsewhere.begin(), elsewhere.end());
  std::vector<AreaContent> rows;
  rows.reserve(found.generators.size() + found.buffers.size());
  for (const replay::ManifestGenerator& g : found.generators)
    rows.push_back({kGenerator, g.generator, g.shadow_offset, g.bytes, 0});
  for (const replay::ManifestBuffer& b : found.buffers)
    if (b.shadow_offset != replay::kNotShadowed && !without.contains(b.handle))
      rows.push_back({kDeviceBuffer, b.handle, b.shadow_offset, b.bytes, b.has_digest == 1 ? b.digest : 0});
  return rows;
}

std::unique_ptr<HeldContents> make_contents(const py::sequence& described, const py::object& area,
                                            const py::object& manifest,
                                            const std::vector<uint64_t>& elsewhere, bool in_place,
                                            uint64_t shortest_run) {
  std::vector<LooseContent> loose;
  std::vector<BufferView> views;
  views.reserve(described.size() + 1);
  loose.reserve(described.size());
  for (const py::handle item : described) {
    const auto row = item.cast<py::tuple>();
    if (row.size() != 3 && row.size() != 4) throw StoreError("an extent is (kind, id, content[, digest])");
    views.emplace_back(row[2], false);
    loose.push_back({row[0].cast<uint32_t>(), row[1].cast<uint64_t>(), views.back().data(),
                     views.back().bytes(), row.size() == 4 ? row[3].cast<uint64_t>() : 0});
  }
  if (area.is_none())
    return std::make_unique<HeldContents>(std::move(views), loose, ContentArea{}, std::vector<AreaContent>{});
  views.emplace_back(area, false);
  const ContentArea of{views.back().data(), views.back().bytes(), in_place, shortest_run};
  if (reinterpret_cast<uintptr_t>(of.data) % kBlock != 0) throw StoreError("an area begins a page");
  try {
    return std::make_unique<HeldContents>(std::move(views), loose, of,
                                          rows_of(BufferView(manifest, false), elsewhere));
  } catch (const replay::LogError& error) {
    throw StoreError(error.what());
  }
}

Receipt persist(const OpenedStore& s, const std::string& job, uint32_t rank, uint32_t world, uint64_t step,
                uint64_t serial, const py::object& extents, uint32_t threads, double timeout_s,
                const py::object& confirm) {
  std::unique_ptr<HeldContents> made;
  if (!py::isinstance<HeldContents>(extents))
    made = make_contents(extents, py::none(), py::none(), {}, false, 0);
  const ConfirmedContents contents(made ? *made : extents.cast<const HeldContents&>(), confirm);
  const uint64_t deadline = deadline_in(timeout_s);
  const py::gil_scoped_release unlocked;
  return s.store->persist({job, rank, world, step, serial}, contents, threads, deadline);
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

void read_into(const OpenedStore& s, uint64_t sequence,
               const std::vector<std::pair<uint64_t, uint64_t>>& extents, const py::object& area,
               bool in_place) {
  const BufferView view(area, true);
  const py::gil_scoped_release unlocked;
  s.store->read_into(sequence, extents, view.data(), view.bytes(), in_place);
}

struct OpenedStream {
  std::shared_ptr<Store> store;
  Store::Stream stream;
};

std::unique_ptr<OpenedStream> stream(const OpenedStore& s, uint64_t sequence) {
  return std::make_unique<OpenedStream>(OpenedStream{s.store, s.store->stream(sequence)});
}

void read_on(OpenedStream& s, const py::object& into) {
  const BufferView view(into, true);
  const py::gil_scoped_release unlocked;
  s.store->read_on(s.stream, view.data(), view.bytes());
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

void bind_contents(py::module_& m) {
  py::class_<HeldContents>(m, "Contents")
      .def(py::init(&make_contents), py::arg("loose"), py::kw_only(), py::arg("area") = py::none(),
           py::arg("manifest") = py::none(), py::arg("elsewhere") = std::vector<uint64_t>(),
           py::arg("in_place") = false, py::arg("shortest_run") = ContentArea{}.shortest_run)
      .def_property_readonly("bytes", [](const HeldContents& c) { return c.bytes(); })
      .def(
          "needed_slot_bytes",
          [](const HeldContents& c, uint64_t chunk_bytes) {
            return Store::needed_slot_bytes(c, chunk_bytes);
          },
          py::kw_only(), py::arg("chunk_bytes") = 4ull << 20);
  py::class_<OpenedStream>(m, "Stream").def("read_into", &read_on, py::arg("into"));
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
      .def_static("needed_slot_bytes",
                  py::overload_cast<const std::vector<uint64_t>&, uint64_t>(&Store::needed_slot_bytes),
                  py::arg("extents"), py::kw_only(), py::arg("chunk_bytes") = 4ull << 20)
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
      .def("read_into", &read_into, py::arg("sequence"), py::arg("extents"), py::arg("area"), py::kw_only(),
           py::arg("in_place") = false)
      .def(
          "digests", [](const OpenedStore& s, uint64_t sequence) { return s.store->digests(sequence); },
          py::arg("sequence"), Unlocked())
      .def("stream", &stream, py::arg("sequence"))
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
  bind_contents(m);
  bind_store(m);
}

}  // namespace understudy::persistence
