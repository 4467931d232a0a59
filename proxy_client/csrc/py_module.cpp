// proxy_client._client: what the Python half of the client needs from the C++ half.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/Event.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Stream.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <time.h>

#include "proxy_client/csrc/autograd_drain.h"
#include "proxy_client/csrc/call/operator_call.h"
#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/generators.h"
#include "proxy_client/csrc/device/host_access.h"
#include "proxy_client/csrc/device/memory_statistics.h"
#include "proxy_client/csrc/device/pinned_memory.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "proxy_client/csrc/distributed/py_process_group.h"
#include "proxy_client/csrc/minibatch_contents.h"
#include "proxy_client/csrc/operators/cpu_branches.h"
#include "proxy_client/csrc/operators/device_check.h"
#include "proxy_client/csrc/operators/local_kernels.h"
#include "proxy_client/csrc/session.h"
#include "proxy_client/csrc/settings.h"
#include "proxy_client/csrc/shapes/shape_cache.h"
#include "proxy_client/csrc/statistics.h"

namespace understudy::client {
namespace {

namespace py = pybind11;

void set_session_opener(py::function open_session) {
  // Never destroyed: the interpreter may be gone by then.
  auto& opener = *std::make_unique<py::function>(std::move(open_session)).release();
  set_interpreter({
      [&opener](int physical_index) {
        const py::gil_scoped_acquire gil;
        return opener(physical_index).cast<std::string>();
      },
      [](const std::function<void()>& work) {
        if (PyGILState_Check() == 0) return work();
        const py::gil_scoped_release released;
        work();
      },
  });
}

// torch.Event's type is published by torch/csrc/cuda in a CUDA build; in a CPU build nobody does it.
bool publish_event_type(const py::object& type) {
  if (THPEventClass) return false;
  THPEventClass = reinterpret_cast<PyTypeObject*>(type.ptr());
  return true;
}

c10::impl::VirtualGuardImpl device_guard() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

int64_t current_stream(c10::DeviceIndex device) {
  return device_guard().getStream(c10::Device(c10::kCUDA, device)).id();
}

void set_current_stream(int64_t id, c10::DeviceIndex device) {
  device_guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id));
}

double elapsed_milliseconds(const py::object& start, const py::object& end) {
  const auto event = [](const py::object& object) -> c10::Event& {
    return reinterpret_cast<THPEvent*>(object.ptr())->event;
  };
  return event(start).elapsedTime(event(end));
}

py::object default_generator_object(c10::DeviceIndex device) {
  return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
}

double nanoseconds_per_tick() {
  const auto now = [] {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
  };
  const double from = now();
  const uint64_t first = ticks();
  const timespec pause{0, 5'000'000};
  nanosleep(&pause, nullptr);
  return (now() - from) / static_cast<double>(ticks() - first);
}

// `query` is a replay::MemoryQuery. Without a session everything is 0.
py::dict memory_dict(uint64_t query) {
  TORCH_CHECK(query < replay::kMemoryQueries, "there is no memory query ", query);
  replay::MemoryStatistics memory{};
  {
    const py::gil_scoped_release released;
    memory = query_memory(static_cast<replay::MemoryQuery>(query));
  }
  const auto counter = [](const replay::MemoryCounter& c) {
    py::dict d;
    d["current"] = c.current;
    d["peak"] = c.peak;
    d["allocated"] = c.allocated;
    d["freed"] = c.freed;
    return d;
  };
  py::dict d;
  d["bytes"] = counter(memory.bytes);
  d["blocks"] = counter(memory.blocks);
  d["reserved"] = counter(memory.reserved);
  d["free_bytes"] = memory.free_bytes;
  d["total_bytes"] = memory.total_bytes;
  return d;
}

// Counters of calls are 0 unless UNDERSTUDY_STATISTICS=1; those of the log are always there.
py::dict statistics_dict() {
  const Statistics& s = statistics();
  static const double scale = nanoseconds_per_tick();  // one for all, so that differences make sense
  const auto ns = [](const std::atomic<uint64_t>& value) {
    return static_cast<double>(value.load()) * scale;
  };
  py::dict d;
  d["enabled"] = statistics_enabled();
  d["calls"] = s.calls.load();
  d["hits"] = s.hits.load();
  d["misses"] = s.misses.load();
  d["synchronous"] = s.synchronous.load();
  d["inferred"] = s.inferred.load();
  d["allocations"] = s.allocations.load();
  d["host_to_device"] = s.host_to_device.load();
  d["device_to_host"] = s.device_to_host.load();
  d["client_ns"] = ns(s.total_ticks);
  d["encode_ns"] = ns(s.encode_ticks);
  d["lookup_ns"] = ns(s.lookup_ticks);
  d["output_ns"] = ns(s.output_ticks);
  d["append_ns"] = ns(s.append_ticks);
  d["templates"] = template_count();
  d["address_blocks"] = address_blocks();
  const LogWriter* log = log_if_open();
  d["records"] = log ? log->records() : 0;
  d["records_passed"] = log ? log->page().server().passed_index.load() : 0;
  d["log_bytes"] = log ? log->bytes() : 0;
  d["wakes"] = log ? log->wakes() : 0;
  d["waits"] = log ? log->waits() : 0;
  d["dictionary_bytes"] = log ? log->page().worker().dictionary_tail.load() : 0;
  return d;
}

py::tuple content_tuple(const MinibatchContent& one) {
  return py::make_tuple(one.payloads, one.bytes, one.digest);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using without_gil = py::call_guard<py::gil_scoped_release>;

  module.attr("TORCH_VERSION") = UNDERSTUDY_TORCH_VERSION;
  module.def("set_session_opener", &set_session_opener);
  module.def("set_driver", &set_driver);
  module.def("session_is_open", [] { return log_if_open() != nullptr; });
  module.def("device_is_busy", &device_is_busy);
  module.def("bound_device", &bound_device);
  module.def("in_bad_fork", &in_bad_fork);
  module.def("close_session", &close_session, without_gil());
  module.def("drain_autograd_threads", &drain_autograd_threads, without_gil());

  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("exchange_device", &exchange_device);
  module.def("synchronize", [] { synchronize(); }, without_gil());
  module.def("current_stream", &current_stream);
  module.def("set_current_stream", &set_current_stream);
  module.def("publish_event_type", &publish_event_type);
  module.def("elapsed_milliseconds", &elapsed_milliseconds);
  module.def("default_generator", &default_generator_object);

  module.def("query_memory", &memory_dict);
  module.def("register_host_memory", &register_host_memory);
  module.def("unregister_host_memory", &unregister_host_memory);
  module.def("renew_host_access_watch", &renew_host_access_watch);
  module.def("resize_untyped_storage", &resize_untyped_storage);

  module.def("known_settings", &known_settings, without_gil());
  module.def("settings_changed", &settings_changed, without_gil());
  module.def(
      "set_threads", [](uint64_t threads) { set_of_thread(replay::Setting::kThreads, threads); },
      without_gil());
  module.def(
      "set_flush_denormal", [](bool mode) { set_of_thread(replay::Setting::kFlushDenormal, mode); },
      without_gil());
  module.def("begin_optimizer_phase", &begin_optimizer_phase, without_gil());
  module.def("commit_step", &commit_step, without_gil());
  module.def("keep_minibatch_contents", &keep_minibatch_contents);
  module.def("take_minibatch_contents", [] {
    py::list rows;
    for (const MinibatchContent& one : take_minibatch_contents()) rows.append(content_tuple(one));
    return rows;
  });
  module.def("open_minibatch_content", [] { return content_tuple(open_minibatch_content()); });
  module.def("snapshot_to_describe", &snapshot_to_describe);
  module.def("step_to_describe", &step_to_describe);
  module.def(
      "locate",
      [](const at::Tensor& tensor) {
        const Location found = locate(tensor);
        return std::pair(found.handle, found.displacement);
      },
      "Handle of a device tensor's buffer, and how many bytes its storage begins behind the buffer's "
      "beginning.");
  module.def("statistics", &statistics_dict);
  module.def("direct_operators", [] { return direct_operators(); });
  module.def("cpu_branches_used", [] {
    py::dict used;
    for (const auto& [name, count] : cpu_branches_used()) used[name] = count;
    return used;
  });
  module.def("host_arguments_used", [] {
    py::dict used;
    for (const auto& [name, count] : host_arguments_used()) used[py::str(name)] = count;
    return used;
  });
  module.def("register_process_group", &register_process_group);
}

}  // namespace understudy::client
