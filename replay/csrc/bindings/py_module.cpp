// The module replay._replay: the log for the tools (proxyd, recoveryctl), the rewind rules for tests. No
// PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "replay/csrc/bindings/py_bind.h"
#include "replay/csrc/digest/digest.h"
#include "replay/csrc/life/process_end.h"
#include "replay/csrc/log/log_map.h"
#include "replay/csrc/log/log_writer.h"
#include "replay/csrc/settings/kernel_environment.h"

namespace py = pybind11;

PYBIND11_MODULE(_replay, m) {
  using namespace understudy::replay;
  auto& log_error = py::register_exception<LogError>(m, "LogError", PyExc_RuntimeError);
  py::register_exception<RetiredTemplate>(m, "RetiredTemplate", log_error);
  py::register_exception<RemoteError>(m, "RemoteError", PyExc_RuntimeError);
  m.def(
      "create_log",
      [](const std::string& directory, uint32_t rank, uint32_t world, uint64_t segment_bytes,
         uint64_t segment_count, uint64_t dictionary_bytes, uint64_t reply_bytes, uint64_t shadow_bytes,
         uint64_t snapshot_bytes, int32_t proxyd_pid, uint64_t proxyd_start_ticks, uint32_t proxyd_grace_s) {
        create_log(
            directory, rank, world,
            {segment_bytes, segment_count, dictionary_bytes, reply_bytes, shadow_bytes, snapshot_bytes},
            proxyd_pid, proxyd_start_ticks, proxyd_grace_s);
      },
      py::arg("directory"), py::kw_only(), py::arg("rank") = 0, py::arg("world") = 1,
      py::arg("segment_bytes") = LogSizes{}.segment_bytes,
      py::arg("segment_count") = LogSizes{}.segment_count,
      py::arg("dictionary_bytes") = LogSizes{}.dictionary_bytes,
      py::arg("reply_bytes") = LogSizes{}.reply_bytes, py::arg("shadow_bytes") = LogSizes{}.shadow_bytes,
      py::arg("snapshot_bytes") = LogSizes{}.snapshot_bytes, py::arg("proxyd_pid") = 0,
      py::arg("proxyd_start_ticks") = 0, py::arg("proxyd_grace_s") = 0,
      "Makes the files of a log (mode 0600) in an existing directory.");
  m.def("digest", [](const py::buffer& content) {
    const py::buffer_info bytes = content.request();
    return digest(bytes.ptr, static_cast<size_t>(bytes.size * bytes.itemsize));
  });
  m.def("content_digest", [](const py::buffer& content) {
    const py::buffer_info bytes = content.request();
    return content_digest(bytes.ptr, static_cast<size_t>(bytes.size * bytes.itemsize));
  });
  m.def("process_start_ticks", &process_start_ticks);
  m.def("die_with_parent", &die_with_parent, "The kernel kills this process when that one dies.");
  m.def("process_is_alive", &process_is_alive);
  m.attr("COMMIT_RING") = kCommitRing;
  m.attr("SNAPSHOT_LEASES") = kSnapshotLeases;
  m.attr("SNAPSHOT_ORDERS") = kSnapshotOrders;
  m.attr("STRICT_NCCL") = std::vector<std::string>(std::begin(kStrictNccl), std::end(kStrictNccl));
  LogClass log = bind_log(m);
  bind_commits(m, log);
  bind_snapshots(m, log);
  bind_log_copy(m);
  bind_life_watch(m);
  bind_log_walk(m);
  bind_mirror(m);
  bind_log_writer(m);
  bind_rewind(m);
}
