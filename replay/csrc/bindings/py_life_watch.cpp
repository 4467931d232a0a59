#include "replay/csrc/bindings/py_bind.h"

#include <pybind11/stl.h>

#include "replay/csrc/life/life_hold.h"
#include "replay/csrc/life/life_watch.h"
#include "replay/csrc/life/process_end.h"
#include "replay/csrc/log/log_map.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

// As a device server does; for tests and bench, which need no PyTorch for it.
struct HeldLog {
  explicit HeldLog(const std::string& directory) : log(directory) {
    hold.hold(log.server_page().shared().server_life);
  }
  LogMap log;
  LifeHold hold;  // goes before the log
};

}  // namespace

void bind_life_watch(py::module_& m) {
  py::enum_<LifeNews>(m, "LifeNews")
      .value("DIED", LifeNews::kDied)
      .value("DISBELIEVED", LifeNews::kDisbelieved)
      .value("UNWATCHED", LifeNews::kUnwatched);
  py::enum_<ProcessEnd>(m, "ProcessEnd")
      .value("RUNS", ProcessEnd::kRuns)
      .value("DYING", ProcessEnd::kDying)
      .value("STOPPED", ProcessEnd::kStopped);
  py::class_<LifeNotice>(m, "LifeNotice")
      .def_readonly("id", &LifeNotice::id)
      .def_readonly("news", &LifeNotice::news)
      .def_readonly("at_ns", &LifeNotice::at_ns);
  py::class_<LifeWatch>(m, "LifeWatch",
                        "Waits for the deaths of device servers by the words they hold in their logs.")
      .def(py::init<>(), "Raises LogError where the kernel has no futex_waitv.")
      .def("fileno", &LifeWatch::descriptor, "Readable when there are notices to take.")
      .def("watch", &LifeWatch::watch, py::arg("directory"), py::arg("pid"), py::arg("start_ticks"),
           py::call_guard<py::gil_scoped_release>(),
           "The word of that log is held, or will be, by this process; raises LogError. Answers a number.")
      .def("forget", &LifeWatch::forget, py::arg("id"), py::call_guard<py::gil_scoped_release>())
      .def("take", &LifeWatch::take, "Notices since the last time, oldest first.");
  py::class_<HeldLog>(m, "HeldLog", "Holds the word of a log, as its device server does (tests, bench).")
      .def(py::init<const std::string&>())
      .def("hold", [](HeldLog& h) { h.hold.hold(h.log.server_page().shared().server_life); })
      .def("let_go", [](HeldLog& h) { h.hold.let_go(); });
  m.def("process_end", &process_end, py::arg("pid"), py::arg("start_ticks"),
        "How far the end of a process has come.");
}

}  // namespace understudy::replay
