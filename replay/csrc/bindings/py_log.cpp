// A rank's log, mapped: its control page, records and drills.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "replay/csrc/bindings/py_bind.h"
#include "replay/csrc/bindings/py_log_rows.h"
#include "replay/csrc/bindings/py_text.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/log_map.h"
#include "replay/csrc/rewind/marks.h"
#include "replay/csrc/tools/log_view.h"
#include "replay/csrc/tools/mirror.h"

namespace py = pybind11;
namespace understudy::replay {

LogClass bind_log(py::module_& m) {
#define READ(part, name) \
  log.def_property_readonly(#name, [](const LogMap& l) { return load(l.page().part().name); })
#define FIXED(part, name) \
  log.def_property_readonly(#name, [](const LogMap& l) { return l.page().part().name; })
  struct MappedArea {
    Mapping mapping;
    bool writable;
  };
  py::class_<MappedArea>(m, "MappedArea", "A file of a log, mapped so that its huge pages count: a buffer.",
                         py::buffer_protocol())
      .def(py::init([](const std::string& path, bool writable) {
             return MappedArea{Mapping(path, 1, writable), writable};
           }),
           py::arg("path"), py::kw_only(), py::arg("writable") = false)
      .def(
          "back",
          [](MappedArea& a) {
            const uint64_t huge = get_huge_pages(a.mapping.data(), a.mapping.bytes());
            if (!reserve_memory(a.mapping.data(), a.mapping.bytes())) throw LogError("there is no memory");
            return huge;
          },
          "Gets memory for all of it; answers how many bytes of that are in huge pages.")
      .def_buffer([](MappedArea& a) {
        return py::buffer_info(a.mapping.data(), static_cast<py::ssize_t>(a.mapping.bytes()), !a.writable);
      });
  LogClass log(m, "Log", "A rank's log, mapped.");
  FIXED(fixed, rank);
  FIXED(fixed, world);
  FIXED(fixed, segment_bytes);
  FIXED(fixed, segment_count);
  FIXED(server, error_index);
  FIXED(fixed, dictionary_bytes);
  READ(worker, tail);
  READ(worker, tail_index);
  READ(worker, dictionary_begin);
  READ(worker, dictionary_tail);
  READ(server, cursor);
  READ(server, cursor_index);
  READ(server, passed_index);
  READ(worker, awaited_index);
  READ(server, phase);
  READ(server, step);
  READ(worker, worker_steps);
  READ(server, call);
  READ(server, progress_ns);
  READ(server, freed_segments);
  READ(worker, backpressure);
  READ(server, in_collective);
  READ(server, degraded);
  READ(server, final_steps);
  READ(server, sealed);
  READ(server, live_buffers);
  READ(server, live_bytes);
  READ(server, undo_bytes);
  READ(server, shadow_used_bytes);
  READ(server, snapshot_used_bytes);
  READ(server, snapshot_failed);
  READ(server, snapshot_begun);
  READ(server, snapshots_taken);
  READ(server, snapshot_ns);
  READ(shared, snapshot_huge_bytes);
  READ(server, replies_compared);
  READ(server, replies_different);
  READ(server, median_calls_per_step);
  READ(server, median_bytes_per_step);
  READ(server, commit_count);
  READ(shared, session_state);
  READ(server, error_kind);
  READ(server, device_lost);
  READ(server, wait_sequence);
  READ(server, validated_step);
  READ(server, validations_failed);
  log.def(py::init<const std::string&>())
      .def_property(
          "server_life", [](const LogMap& l) { return load(l.page().shared().server_life); },
          [](LogMap& l, uint32_t word) {
            l.daemon_page().shared().server_life.store(word);
            futex_wake(l.daemon_page().shared().server_life);
          },
          "The word that a device server holds (life_word.h); written by tests.")
      .def_property_readonly(
          "device_message",
          [](const LogMap& l) { return as_text(text_of(l.page().server().device_message)); })
      .def_property_readonly(
          "waits_for",
          [](const LogMap& l) {
            const auto p = l.page();
            return std::pair(load(p.server().wait_uid_low), load(p.server().wait_uid_high));
          },
          "The communicator (uid_low, uid_high) whose collective the server waits for while in_collective.")
      .def(
          "started",
          [](const LogMap& l) {
            std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> found;
            const auto p = l.page();
            const uint64_t count = load(p.server().started_count);
            for (uint64_t i = 0; i < std::min(count, kMarksInPlace); i++)
              found.emplace_back(load(p.server().started[i].uid_low), load(p.server().started[i].uid_high),
                                 load(p.server().started[i].sequence), load(p.server().started[i].size));
            for (const CommunicatorMark& mark : read_more_marks(l, kStartedRow, count))
              found.emplace_back(mark.uid_low, mark.uid_high, mark.sequence, mark.members);
            return found;
          },
          "Of each communicator: (uid_low, uid_high, collectives begun, members).")
      .def_property_readonly("recent_calls",
                             [](const LogMap& l) {
                               std::vector<uint64_t> calls;
                               for (const auto& n : l.page().server().recent_calls) calls.push_back(load(n));
                               return calls;
                             })
      .def_property_readonly(
          "validation_message",
          [](const LogMap& l) { return as_text(text_of(l.page().server().validation_message)); })
      .def_property(
          "validate_step", [](const LogMap& l) { return load(l.page().shared().validate_step); },
          [](LogMap& l, uint64_t step) {
            l.daemon_page().shared().validate_step.store(step, std::memory_order_release);
          })
      .def_property_readonly(
          "error_operator",
          [](const LogMap& l) { return as_text(text_of(l.page().server().error_operator)); })
      .def_property_readonly(
          "error_message", [](const LogMap& l) { return as_text(text_of(l.page().server().error_message)); })
      .def_property(
          "floor_commit", [](const LogMap& l) { return load(l.page().shared().floor_commit); },
          [](LogMap& l, uint64_t floor) {
            l.daemon_page().shared().floor_commit.store(floor, std::memory_order_release);
          })
      .def_property(
          "log_kept_from", [](const LogMap& l) { return load(l.page().daemon().log_kept_from); },
          [](LogMap& l, uint64_t offset) {
            l.daemon_page().daemon().log_kept_from.store(offset, std::memory_order_release);
          })
      .def_property(
          "log_uncopied_from", [](const LogMap& l) { return load(l.page().daemon().log_uncopied_from); },
          [](LogMap& l, uint64_t from) {
            l.daemon_page().daemon().log_uncopied_from.store(from, std::memory_order_release);
          })
      .def_property(
          "describe_steps", [](const LogMap& l) { return load(l.page().daemon().describe_steps) != 0; },
          [](LogMap& l, bool on) {
            l.daemon_page().daemon().describe_steps.store(on ? 1 : 0, std::memory_order_release);
          })
      .def(
          "lose", [](LogMap& l, const std::string& message) { lose_session(l, message); },
          "Ends the session; the worker raises `message` at its next call.")
      .def(
          "supervise",
          [](LogMap& l, int32_t pid, uint64_t start_ticks) {
            l.daemon_page().daemon().proxyd_start_ticks.store(start_ticks);
            l.daemon_page().daemon().proxyd_pid.store(pid);
          },
          py::arg("pid"), py::arg("start_ticks"), "This proxyd supervises the session from here on.")
      .def_property_readonly("lost_message",
                             [](const LogMap& l) { return as_text(text_of(l.page().shared().lost_message)); })
      .def(
          "take_last_words",
          [](LogMap& l) {
            const auto page = l.daemon_page();
            if (page.shared().session_state.load(std::memory_order_acquire) != 0) return py::str();
            py::str words = as_text(text_of(page.shared().lost_message));
            page.shared().lost_message[0] = '\0';
            return words;
          },
          "Why the device server of a session that goes on has ended, if it could say so; empty after that.")
      .def_property_readonly("proxyd_pid",
                             [](const LogMap& l) { return l.page().daemon().proxyd_pid.load(); })
      .def("add_drill",
           [](LogMap& l, uint32_t kind, uint64_t step, uint64_t call) {
             const DaemonPage p = l.daemon_page();
             const uint32_t n = p.daemon().drill_count.load();
             if (n >= kMaxDrills)
               throw LogError("more than " + std::to_string(kMaxDrills) + " drills for one rank");
             p.shared().drills[n].kind = kind;
             p.shared().drills[n].step = step;
             p.shared().drills[n].call = call;
             p.shared().drills[n].fired_at_ns = 0;
             p.shared().drills[n].detail = 0;
             p.shared().drills[n].state.store(0);
             p.daemon().drill_count.store(n + 1, std::memory_order_release);
           })
      .def("drills",
           [](const LogMap& l) {
             std::vector<std::tuple<uint32_t, uint64_t, uint64_t, uint32_t, uint64_t, uint64_t>> found;
             const ReaderPage p = l.page();
             for (uint32_t i = 0; i < std::min<uint64_t>(p.daemon().drill_count.load(), kMaxDrills); i++)
               found.emplace_back(p.shared().drills[i].kind, p.shared().drills[i].step,
                                  p.shared().drills[i].call,
                                  p.shared().drills[i].state.load(std::memory_order_acquire),
                                  p.shared().drills[i].fired_at_ns, p.shared().drills[i].detail);
             return found;
           })
      .def(
          "drill_done",
          [](LogMap& l, uint32_t slot) {
            if (slot >= kMaxDrills) throw LogError("there is no drill " + std::to_string(slot));
            l.daemon_page().shared().drills[slot].state.store(static_cast<uint32_t>(DrillState::kDone));
          },
          "proxyd has done its part of a drill that fired: the server need not wait any longer.")
      .def("dump", &dump, py::arg("first") = py::none(), py::arg("count") = py::none())
      .def_static("now_ns", &now_ns, "CLOCK_MONOTONIC, nanoseconds.");
#undef READ
#undef FIXED
  return log;
}

}  // namespace understudy::replay
