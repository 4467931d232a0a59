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
#define READ(name) log.def_property_readonly(#name, [](const LogMap& l) { return load(l.page().name); })
#define FIXED(name) log.def_property_readonly(#name, [](const LogMap& l) { return l.page().name; })
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
  FIXED(rank);
  FIXED(world);
  FIXED(segment_bytes);
  FIXED(segment_count);
  FIXED(error_index);
  FIXED(dictionary_bytes);
  READ(tail);
  READ(tail_index);
  READ(dictionary_begin);
  READ(dictionary_tail);
  READ(cursor);
  READ(cursor_index);
  READ(passed_index);
  READ(awaited_index);
  READ(phase);
  READ(step);
  READ(worker_steps);
  READ(call);
  READ(progress_ns);
  READ(freed_segments);
  READ(backpressure);
  READ(in_collective);
  READ(degraded);
  READ(final_steps);
  READ(sealed);
  READ(live_buffers);
  READ(live_bytes);
  READ(undo_bytes);
  READ(shadow_used_bytes);
  READ(snapshot_used_bytes);
  READ(snapshot_failed);
  READ(snapshot_begun);
  READ(snapshots_taken);
  READ(snapshot_ns);
  READ(snapshot_huge_bytes);
  READ(replies_compared);
  READ(replies_different);
  READ(median_calls_per_step);
  READ(median_bytes_per_step);
  READ(commit_count);
  READ(session_state);
  READ(error_kind);
  READ(device_lost);
  READ(wait_sequence);
  READ(validated_step);
  READ(validations_failed);
  log.def(py::init<const std::string&>())
      .def_property(
          "server_life", [](const LogMap& l) { return load(l.page().server_life); },
          [](LogMap& l, uint32_t word) {
            l.page().server_life.store(word);
            futex_wake(l.page().server_life);
          },
          "The word that a device server holds (life_word.h); written by tests.")
      .def_property_readonly("device_message",
                             [](const LogMap& l) { return as_text(text_of(l.page().device_message)); })
      .def_property_readonly(
          "waits_for",
          [](const LogMap& l) {
            const auto& p = l.page();
            return std::pair(load(p.wait_uid_low), load(p.wait_uid_high));
          },
          "The communicator (uid_low, uid_high) whose collective the server waits for while in_collective.")
      .def(
          "started",
          [](const LogMap& l) {
            std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> found;
            const auto& p = l.page();
            const uint64_t count = load(p.started_count);
            for (uint64_t i = 0; i < std::min(count, kMarksInPlace); i++)
              found.emplace_back(load(p.started[i].uid_low), load(p.started[i].uid_high),
                                 load(p.started[i].sequence), load(p.started[i].size));
            for (const CommunicatorMark& mark : read_more_marks(l, kStartedRow, count))
              found.emplace_back(mark.uid_low, mark.uid_high, mark.sequence, mark.members);
            return found;
          },
          "Of each communicator: (uid_low, uid_high, collectives begun, members).")
      .def_property_readonly("recent_calls",
                             [](const LogMap& l) {
                               std::vector<uint64_t> calls;
                               for (const auto& n : l.page().recent_calls) calls.push_back(load(n));
                               return calls;
                             })
      .def_property_readonly("validation_message",
                             [](const LogMap& l) { return as_text(text_of(l.page().validation_message)); })
      .def_property(
          "validate_step", [](const LogMap& l) { return load(l.page().validate_step); },
          [](LogMap& l, uint64_t step) { l.page().validate_step.store(step, std::memory_order_release); })
      .def_property_readonly("error_operator",
                             [](const LogMap& l) { return as_text(text_of(l.page().error_operator)); })
      .def_property_readonly("error_message",
                             [](const LogMap& l) { return as_text(text_of(l.page().error_message)); })
      .def_property(
          "floor_commit", [](const LogMap& l) { return load(l.page().floor_commit); },
          [](LogMap& l, uint64_t floor) { l.page().floor_commit.store(floor, std::memory_order_release); })
      .def_property(
          "log_kept_from", [](const LogMap& l) { return load(l.page().log_kept_from); },
          [](LogMap& l, uint64_t offset) { l.page().log_kept_from.store(offset, std::memory_order_release); })
      .def_property(
          "log_uncopied_from", [](const LogMap& l) { return load(l.page().log_uncopied_from); },
          [](LogMap& l, uint64_t from) { l.page().log_uncopied_from.store(from, std::memory_order_release); })
      .def_property(
          "describe_steps", [](const LogMap& l) { return load(l.page().describe_steps) != 0; },
          [](LogMap& l, bool on) { l.page().describe_steps.store(on ? 1 : 0, std::memory_order_release); })
      .def(
          "lose", [](LogMap& l, const std::string& message) { lose_session(l, message); },
          "Ends the session; the worker raises `message` at its next call.")
      .def(
          "supervise",
          [](LogMap& l, int32_t pid, uint64_t start_ticks) {
            l.page().proxyd_start_ticks.store(start_ticks);
            l.page().proxyd_pid.store(pid);
          },
          py::arg("pid"), py::arg("start_ticks"), "This proxyd supervises the session from here on.")
      .def_property_readonly("lost_message",
                             [](const LogMap& l) { return as_text(text_of(l.page().lost_message)); })
      .def(
          "take_last_words",
          [](LogMap& l) {
            auto& page = l.page();
            if (page.session_state.load(std::memory_order_acquire) != 0) return py::str();
            py::str words = as_text(text_of(page.lost_message));
            page.lost_message[0] = '\0';
            return words;
          },
          "Why the device server of a session that goes on has ended, if it could say so; empty after that.")
      .def_property_readonly("proxyd_pid", [](const LogMap& l) { return l.page().proxyd_pid.load(); })
      .def("add_drill",
           [](LogMap& l, uint32_t kind, uint64_t step, uint64_t call) {
             ControlPage& p = l.page();
             const uint32_t n = p.drill_count.load();
             if (n >= kMaxDrills)
               throw LogError("more than " + std::to_string(kMaxDrills) + " drills for one rank");
             p.drills[n].kind = kind;
             p.drills[n].step = step;
             p.drills[n].call = call;
             p.drills[n].fired_at_ns = 0;
             p.drills[n].detail = 0;
             p.drills[n].state.store(0);
             p.drill_count.store(n + 1, std::memory_order_release);
           })
      .def("drills",
           [](const LogMap& l) {
             std::vector<std::tuple<uint32_t, uint64_t, uint64_t, uint32_t, uint64_t, uint64_t>> found;
             const ControlPage& p = l.page();
             for (uint32_t i = 0; i < std::min<uint64_t>(p.drill_count.load(), kMaxDrills); i++)
               found.emplace_back(p.drills[i].kind, p.drills[i].step, p.drills[i].call,
                                  p.drills[i].state.load(std::memory_order_acquire), p.drills[i].fired_at_ns,
                                  p.drills[i].detail);
             return found;
           })
      .def(
          "drill_done",
          [](LogMap& l, uint32_t slot) {
            if (slot >= kMaxDrills) throw LogError("there is no drill " + std::to_string(slot));
            l.page().drills[slot].state.store(static_cast<uint32_t>(DrillState::kDone));
          },
          "proxyd has done its part of a drill that fired: the server need not wait any longer.")
      .def("dump", &dump, py::arg("first") = py::none(), py::arg("count") = py::none())
      .def_static("now_ns", &now_ns, "CLOCK_MONOTONIC, nanoseconds.");
#undef READ
#undef FIXED
  return log;
}

}  // namespace understudy::replay
