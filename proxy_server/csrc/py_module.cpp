// The module proxy_server._server: the executor's controls for device_server.py. Every call releases the GIL.
#include <sys/prctl.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "proxy_server/csrc/driver/device_trial.h"
#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/executor.h"
#include "proxy_server/csrc/nccl/backend.h"
#include "proxy_server/csrc/operators/equivalents.h"
#include "proxy_server/csrc/operators/wider_types.h"
#include "proxy_server/csrc/settings.h"
#include "replay/csrc/settings/torch_settings.h"

namespace py = pybind11;
using understudy::server::AttachOptions;
using understudy::server::BackendRequest;
using understudy::server::Exact;
using understudy::server::Executor;
using understudy::server::FaultKind;
using understudy::server::State;
using Release = py::call_guard<py::gil_scoped_release>;

namespace {

const char* name_of(State state) {
  switch (state) {
    case State::kIdle:
      return "idle";
    case State::kParked:
      return "parked";
    case State::kRunning:
      return "running";
    case State::kEnded:
      return "ended";
  }
  return "unknown";
}

const char* name_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::kCollective:
      return "collective";
    case FaultKind::kCall:
      return "call";
    case FaultKind::kValidation:
      return "validation";
    case FaultKind::kSuspect:
      return "suspect";
    case FaultKind::kRestart:
      return "restart";
  }
  return "unknown";
}

using PythonFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(std::string, uint32_t, int64_t, int64_t, int64_t)>;

void set_exact(const std::string& exact) {
  if (exact != "off" && exact != "on" && exact != "strict")
    throw py::value_error("exact must be off, on or strict, not " + exact);
  understudy::server::set_exact(exact == "off" ? Exact::kOff : exact == "on" ? Exact::kOn : Exact::kStrict);
}

std::unique_ptr<Executor> make_executor(PythonFactory factory) {
  py::gil_scoped_release release;
  return std::make_unique<Executor>([factory = std::move(factory)](const BackendRequest& r) {
    return factory(r.uid, r.generation, r.rank, r.size, r.timeout_ms);
  });
}

void attach(Executor& e, const std::string& log_directory, const std::string& device, int threads,
            bool protect, bool optimizer_preimages, uint32_t generation, uint64_t block_until_commit) {
  AttachOptions o;
  o.log_directory = log_directory;
  o.device = device;
  o.threads = threads;
  o.policy = {protect, optimizer_preimages};
  o.generation = generation;
  o.block_until_commit = block_until_commit;
  e.attach(o);
}

py::bytes read_state(Executor& e, uint64_t handle, uint64_t offset, uint64_t bytes) {
  if (bytes > (64ull << 20)) throw std::invalid_argument("read at most 64 MiB at once");
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
  if (made == nullptr) throw py::error_already_set();
  auto content = py::reinterpret_steal<py::bytes>(made);
  char* const to = PyBytes_AS_STRING(made);  // nobody else has it yet
  {
    py::gil_scoped_release release;
    e.parked_state().read_state(handle, offset, bytes, to);
  }
  return content;
}

// The bytes of a contiguous buffer. It must outlive what is done with them.
uint64_t bytes_of(const py::buffer_info& info) {
  if (info.ndim != 1 || info.strides[0] != info.itemsize)
    throw std::invalid_argument("contiguous bytes are needed");
  return static_cast<uint64_t>(info.size) * static_cast<uint64_t>(info.itemsize);
}

void read_state_into(Executor& e, uint64_t handle, uint64_t offset, uint64_t bytes, const py::buffer& memory,
                     uint64_t at) {
  const py::buffer_info info = memory.request(/*writable=*/true);
  const uint64_t room = bytes_of(info);
  if (at > room || bytes > room - at) throw std::invalid_argument("there is no room for so much state");
  py::gil_scoped_release release;
  e.parked_state().read_state(handle, offset, bytes, static_cast<uint8_t*>(info.ptr) + at);
}

std::optional<std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>> locate(Executor& e) {
  const auto places = e.parked_state().locate();
  if (!places) return std::nullopt;
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> rows;
  for (const auto& place : *places) rows.emplace_back(place.handle, place.address, place.bytes);
  return rows;
}

// Where only ancestors may read a process's memory (Yama), this one may as well; 0: nobody else.
void permit_reader(int pid) { prctl(PR_SET_PTRACER, static_cast<unsigned long>(pid), 0, 0, 0); }

void adopt_replica(Executor& e, uint64_t handle, uint64_t offset, const py::buffer& data) {
  const py::buffer_info info = data.request();
  const uint64_t bytes = bytes_of(info);
  py::gil_scoped_release release;
  e.parked_state().adopt_replica(handle, offset, info.ptr, bytes);
}

}  // namespace

PYBIND11_MODULE(_server, m) {
  m.doc() = "The executor of a device server.";
  m.attr("TORCH_VERSION") = UNDERSTUDY_TORCH_VERSION;
  m.attr("EQUIVALENT_OPERATORS") = understudy::server::equivalent_operators();
  m.attr("WIDENED_OPERATORS") = understudy::server::widened_operators();
  m.def("set_exact", &set_exact, py::arg("exact"),
        "'on' or 'strict': take only kernels that give the same bits each time, in all sessions of this "
        "process. 'off': those that the script chooses. Raises ValueError.");
  m.def("keep_freed_memory", &understudy::server::keep_freed_memory,
        "Before this process has threads: what they free stays with it, in one heap.");
  m.def("touch_memory", &understudy::server::touch_memory, py::arg("bytes"), Release(),
        "Take so much memory from the kernel, so that a session that comes finds it there.");
  m.def(
      "try_device", [](const std::string& device) { understudy::server::try_device(c10::Device(device)); },
      py::arg("device"), Release(), "Raises what the driver says where it does not compute, or not right.");
  m.def(
      "nccl_version",
      [] {
        namespace nccl = understudy::server::nccl;
        return nccl::version_text(nccl::library().version);
      },
      Release(),
      "Of the library that own_collectives() calls; raises RuntimeError, a sentence, without one.");
  m.def(
      "own_collectives",
      [](c10::intrusive_ptr<c10d::Store> store, int rank, int size, int64_t timeout_ms) {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<understudy::server::nccl::Backend>(
            std::move(store), rank, size, std::chrono::milliseconds(timeout_ms)));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout_ms"), Release(),
      "A process group on GPUs by our own calls of NCCL; `timeout_ms`: for connecting to its members.");
  m.def("permit_reader", &permit_reader, py::arg("pid"),
        "Let that process read the memory of this one, where the kernel lets only ancestors; 0: none.");
  m.def(
      "sticky_error",
      [](const std::string& message) {
        return std::string(understudy::server::sticky_error(std::string_view(message)));
      },
      "The part of a message that names an error of the driver which nothing in the process survives.");
  m.def("sticky_errors", &understudy::server::sticky_errors, "All of these, with their codes.");
  m.def(
      "settings",
      [] {
        std::vector<std::tuple<uint64_t, uint64_t, std::optional<uint64_t>>> rows;
        for (const auto& row : understudy::replay::torch_settings())
          rows.emplace_back(static_cast<uint64_t>(row.setting), row.most, understudy::replay::value_of(row));
        return rows;
      },
      "Number, largest value and present value of every setting of PyTorch's, as the calling thread has "
      "them.");
  py::class_<Executor>(m, "Executor")
      .def(py::init(&make_executor))
      .def("attach", &attach, py::arg("log_directory"), py::kw_only(), py::arg("device"), py::arg("threads"),
           py::arg("protect"), py::arg("optimizer_preimages"), py::arg("generation"),
           py::arg("block_until_commit") = 0, Release())
      .def("resume", &Executor::resume, Release())
      .def("park", &Executor::park, Release())
      .def("hold", &Executor::hold, Release())
      .def("let_go", &Executor::let_go, Release())
      .def("rewind", &Executor::rewind, Release())
      .def("restore", &Executor::restore, Release())
      .def("restore_snapshot", &Executor::restore_snapshot, Release())
      .def(
          "roll_forward",
          [](Executor& e, std::vector<uint64_t> rolled, std::vector<uint64_t> steady,
             std::vector<uint64_t> own, std::vector<uint64_t> lost, uint64_t step_digest) {
            e.roll_forward(
                {std::move(rolled), std::move(steady), std::move(own), std::move(lost), step_digest});
          },
          py::kw_only(), py::arg("rolled"), py::arg("steady"), py::arg("own"), py::arg("lost"),
          py::arg("step_digest"), Release())
      .def("rebuild", &Executor::rebuild, Release())
      .def("begin_rebuild", &Executor::begin_rebuild, Release())
      .def("detach", &Executor::detach, Release())
      .def("set_replicated", &Executor::set_replicated, Release())
      .def(
          "has_content", [](Executor& e, uint64_t handle) { return e.parked_state().has_content(handle); },
          Release())
      .def(
          "buffer_bytes",
          [](Executor& e, uint64_t handle) {
            auto* b = e.parked_state().table().find(handle);
            return b == nullptr ? uint64_t{0} : static_cast<uint64_t>(b->content.nbytes());
          },
          Release())
      .def("read_state", &read_state)
      .def("read_state_into", &read_state_into)
      .def("adopt_replica", &adopt_replica)
      .def("locate", &locate, Release())
      .def(
          "read_from_process",
          [](Executor& e, int pid, const std::vector<std::pair<uint64_t, uint64_t>>& places) {
            return e.parked_state().read_from_process(pid, places);
          },
          Release())
      .def(
          "mark_lost", [](Executor& e, uint64_t handle) { e.parked_state().mark_lost(handle); }, Release())
      .def(
          "complete_restore",
          [](Executor& e, const std::vector<std::pair<uint64_t, uint64_t>>& digests) {
            e.parked_state().complete_restore(digests);
          },
          Release())
      .def(
          "wait_for_fault",
          [](Executor& e,
             long milliseconds) -> std::optional<std::tuple<std::string, std::string, uint64_t>> {
            const auto fault = e.wait_for_fault(milliseconds);
            if (!fault) return std::nullopt;
            return std::tuple(name_of(fault->kind), fault->message, fault->record_index);
          },
          Release())
      .def_property_readonly("state", [](const Executor& e) { return name_of(e.current()); })
      .def_property_readonly("cursor_index", &Executor::cursor_index)
      .def_property_readonly("commit", &Executor::commit)
      .def_property_readonly("rolling", &Executor::rolling);
}
