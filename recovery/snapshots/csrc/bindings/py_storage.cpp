// The storage engines for Python: tests and measurements only.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <map>
#include <memory>
#include <string>

#include "recovery/snapshots/csrc/engines/group_sync.h"
#include "recovery/snapshots/csrc/storage/storage.h"
#include "recovery/snapshots/csrc/storage/stream_copy.h"
#include "recovery/snapshots/csrc/testing/parallel_io.h"
#include "recovery/snapshots/csrc/testing/raw_loop.h"

namespace py = pybind11;

namespace understudy::persistence {
namespace {

using Unlocked = py::gil_scoped_release;

const std::map<std::string, Engine> kEngines = {{"auto", Engine::kAuto},     {"uring", Engine::kUring},
                                                {"direct", Engine::kDirect}, {"buffered", Engine::kBuffered},
                                                {"mmap", Engine::kMmap},     {"dax", Engine::kDax}};

// Holds a Python buffer still.
class Bytes {
 public:
  Bytes(const py::buffer& buffer, bool writable) : info_(buffer.request(writable)) {
    if (PyBuffer_IsContiguous(info_.view(), 'C') == 0)
      throw StorageError(EINVAL, "the buffer is not contiguous");
  }
  uint8_t* data() const { return static_cast<uint8_t*>(info_.ptr); }
  uint64_t count() const { return static_cast<uint64_t>(info_.size * info_.itemsize); }

 private:
  py::buffer_info info_;
};

class PyWriter {
 public:
  explicit PyWriter(std::unique_ptr<Writer> writer) : writer_(std::move(writer)) {}
  uint32_t depth() const { return writer_->depth(); }
  // The buffers are kept until the writer is gone: a write that fails may leave others under way.
  void submit(uint64_t offset, const py::buffer& data, uint64_t token) {
    const Bytes& bytes = *kept_.emplace_back(std::make_unique<Bytes>(data, false));
    Unlocked unlocked;
    writer_->submit(offset, bytes.data(), bytes.count(), token);
  }
  uint64_t wait() {
    Unlocked unlocked;
    return writer_->wait();
  }

 private:
  std::vector<std::unique_ptr<Bytes>> kept_;
  std::unique_ptr<Writer> writer_;
};

class PyStorage {
 public:
  PyStorage(const std::string& path, const std::string& engine, bool writable) {
    const auto found = kEngines.find(engine);
    if (found == kEngines.end()) throw StorageError(EINVAL, "there is no engine called " + engine);
    storage_ = open_storage(path, found->second, writable, &notes_);
  }
  Storage& get() const {
    if (storage_ == nullptr) throw StorageError(EBADF, "the storage is closed");
    return *storage_;
  }
  const std::string& notes() const { return notes_; }
  void close() { storage_.reset(); }  // no writer may be left

 private:
  std::string notes_;
  std::unique_ptr<Storage> storage_;
};

void bind_storage(py::module_& m) {
  py::class_<PyWriter>(m, "Writer")
      .def_property_readonly("depth", &PyWriter::depth)
      .def("submit", &PyWriter::submit, py::arg("offset"), py::arg("data"), py::arg("token"))
      .def("wait", &PyWriter::wait);
  py::class_<PyStorage>(m, "Storage")
      .def(py::init<const std::string&, const std::string&, bool>(), py::arg("path"),
           py::arg("engine") = "auto", py::arg("writable") = true)
      .def_property_readonly("name", [](const PyStorage& s) { return s.get().name(); })
      .def_property_readonly("engine", [](const PyStorage& s) { return s.get().engine(); })
      .def_property_readonly("bytes", [](const PyStorage& s) { return s.get().bytes(); })
      .def_property_readonly("alignment", [](const PyStorage& s) { return s.get().alignment(); })
      .def_property_readonly("notes", &PyStorage::notes)
      .def("close", &PyStorage::close)
      .def(
          "writer", [](PyStorage& s) { return PyWriter(s.get().writer()); }, py::keep_alive<0, 1>())
      .def("sync",
           [](PyStorage& s) {
             Unlocked unlocked;
             s.get().sync();
           })
      .def("sync_range",
           [](PyStorage& s, uint64_t offset, uint64_t bytes) {
             Unlocked unlocked;
             s.get().sync(offset, bytes);
           })
      .def(
          "read",
          [](const PyStorage& s, uint64_t offset, const py::buffer& into, uint64_t block, uint32_t threads) {
            const Bytes data(into, true);
            Unlocked unlocked;
            const uint64_t most = data.count() > 0 ? data.count() : 1;
            read_blocks(s.get(), offset, data.data(),
                        {data.count(), block > 0 ? block : most, threads, 1, 0});
          },
          py::arg("offset"), py::arg("into"), py::arg("block") = 0, py::arg("threads") = 1)
      .def(
          "write",
          [](PyStorage& s, uint64_t offset, const py::buffer& from, uint64_t block, uint32_t threads,
             uint32_t depth, uint64_t seed) {
            const Bytes data(from, false);
            Unlocked unlocked;
            const uint64_t most = data.count() > 0 ? data.count() : 1;
            write_blocks(s.get(), offset, data.data(),
                         {data.count(), block > 0 ? block : most, threads, depth, seed});
          },
          py::arg("offset"), py::arg("data"), py::arg("block") = 0, py::arg("threads") = 1,
          py::arg("depth") = 1, py::arg("seed") = 0);
}

void bind_parts(py::module_& m) {
  py::class_<GroupSync>(m, "GroupSync", "The rule for failed flushes, over a flush of the test's own.")
      .def(py::init([](const std::string& name, const GroupSync::Flush& flush) {
             return std::make_unique<GroupSync>(name, [flush](uint64_t begin, uint64_t end) {
               const py::gil_scoped_acquire locked;
               try {
                 return flush(begin, end);
               } catch (py::error_already_set& error) {  // a flush must not throw
                 error.discard_as_unraisable("flush");
                 return ECANCELED;
               }
             });
           }),
           py::arg("name"), py::arg("flush"))
      .def("sync", &GroupSync::sync, py::call_guard<Unlocked>())
      .def("waiting", &GroupSync::waiting, py::call_guard<Unlocked>());
  m.def("stream_kinds", [] {
    py::dict kinds;
    kinds["sse2"] = can_stream(Stream::kSse2);
    kinds["avx512"] = can_stream(Stream::kAvx512);
    return kinds;
  });
  m.def(
      "stream_copy",
      [](const std::string& kind, const py::buffer& to, uint64_t to_offset, const py::buffer& from,
         uint64_t from_offset, uint64_t count) {
        const Stream stream = kind == "avx512" ? Stream::kAvx512 : Stream::kSse2;
        const Bytes target(to, true), source(from, false);
        if (to_offset + count > target.count() || from_offset + count > source.count() || !can_stream(stream))
          throw StorageError(EINVAL, "no such stream copy");
        stream_copy(stream, target.data() + to_offset, source.data() + from_offset, count);
        fence_stores();
      },
      py::arg("kind"), py::arg("to"), py::arg("to_offset"), py::arg("source"), py::arg("from_offset"),
      py::arg("count"));
  m.def(
      "raw_loop",
      [](const std::string& path, bool write, const py::buffer& buffer, uint64_t block, uint32_t threads,
         uint32_t depth) {
        const Bytes data(buffer, !write);
        Unlocked unlocked;
        return raw_loop(path, write, data.data(), {data.count(), block, threads, depth, 0});
      },
      py::arg("path"), py::arg("write"), py::arg("buffer"), py::arg("block"), py::arg("threads"),
      py::arg("depth"), "Direct I/O without an engine: what the disk can do.  Seconds.");
}

}  // namespace
}  // namespace understudy::persistence

PYBIND11_MODULE(_storage, m) {
  using namespace understudy::persistence;
  // As Python's own: FileExistsError, PermissionError, OSError with errno.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const StorageError& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
  m.def("create_file", &create_file, py::arg("path"), py::arg("bytes"),
        py::call_guard<py::gil_scoped_release>());
  bind_storage(m);
  bind_parts(m);
}
