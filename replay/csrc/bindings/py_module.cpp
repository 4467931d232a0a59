// The module replay._replay: the log for the tools (proxyd, recoveryctl), the rewind rules for tests. No
// PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "replay/csrc/bindings/py_life_watch.h"
#include "replay/csrc/bindings/py_log_copy.h"
#include "replay/csrc/bindings/py_log_rows.h"
#include "replay/csrc/bindings/py_mirror.h"
#include "replay/csrc/bindings/py_text.h"
#include "replay/csrc/digest/digest.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/log_writer.h"
#include "replay/csrc/log/names.h"
#include "replay/csrc/rewind/manifest.h"
#include "replay/csrc/rewind/rewind.h"
#include "replay/csrc/settings/kernel_environment.h"
#include "replay/csrc/tools/log_view.h"
#include "replay/csrc/tools/mirror.h"
#include "replay/csrc/tools/snapshot_restore.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

struct Buffer {
  uint64_t handle, bytes;
  std::optional<uint64_t> digest;
  bool shadowed;
};

std::vector<Buffer> manifest_buffers(const LogMap& log, uint64_t number) {
  std::vector<Buffer> found;
  if (number == 0) return found;
  const Manifest manifest = Manifest::read(log.shadows(), commit_entry(log, number));
  for (const ManifestBuffer& b : manifest.buffers)
    found.push_back({b.handle, b.bytes, b.has_digest == 1 ? std::optional(b.digest) : std::nullopt,
                     b.shadow_offset != kNotShadowed || b.has_digest == 2});
  return found;
}

// Digests of some buffers at a commit, in the order asked for; none where it has none.
std::vector<std::optional<uint64_t>> digests(const LogMap& log, uint64_t number,
                                             const std::vector<uint64_t>& handles) {
  std::vector<std::optional<uint64_t>> found(handles.size());
  if (number == 0) return found;
  const Manifest manifest = Manifest::read(log.shadows(), commit_entry(log, number));
  std::unordered_map<uint64_t, uint64_t> of_handle;
  of_handle.reserve(manifest.buffers.size());
  for (const ManifestBuffer& b : manifest.buffers)
    if (b.has_digest == 1) of_handle.emplace(b.handle, b.digest);
  for (size_t i = 0; i < handles.size(); i++)
    if (const auto it = of_handle.find(handles[i]); it != of_handle.end()) found[i] = it->second;
  return found;
}

struct Contents {
  CommitView commit;
  py::bytes row, manifest;
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> buffers, generators;
};

Contents contents_of(const SnapshotContents& found) {
  std::string manifest(found.manifest.encoded_bytes(), '\0');
  found.manifest.encode(reinterpret_cast<uint8_t*>(manifest.data()));
  const std::vector<uint8_t> row = encode_row(found.commit);
  Contents contents{describe(found.commit),
                    py::bytes(reinterpret_cast<const char*>(row.data()), row.size()),
                    py::bytes(manifest),
                    {},
                    {}};
  for (const ManifestBuffer& b : found.manifest.buffers)
    if (b.shadow_offset != kNotShadowed)
      contents.buffers.emplace_back(b.handle, b.bytes, b.digest, b.shadow_offset);
  for (const ManifestGenerator& g : found.manifest.generators)
    contents.generators.emplace_back(g.generator, g.bytes, 0, g.shadow_offset);
  return contents;
}

std::vector<py::bytes> short_rows(const LogMap& log) {
  std::vector<py::bytes> found;
  for (const CommitRow& row : commit_rows(log)) found.emplace_back(encode_short_row(row));
  return found;
}

Contents read_contents(const LogMap& log, uint64_t serial) {
  return contents_of(snapshot_contents(log, serial));
}

Contents begin_restore(LogMap& log, const py::bytes& row, const py::bytes& manifest) {
  const std::string_view rest(manifest);
  return contents_of(
      make_room_for_snapshot(log, decode_row(std::string_view(row)), {rest.begin(), rest.end()}));
}

void finish_restore(LogMap& log, uint64_t serial, const Contents& contents,
                    const std::vector<uint64_t>& checked) {
  const std::string_view rest(contents.manifest);
  const CommitRow commit = decode_row(std::string_view(contents.row));
  const std::vector<uint8_t> manifest(rest.begin(), rest.end());
  py::gil_scoped_release release;
  publish_restored_snapshot(log, serial, commit, manifest, checked);
}

// ---- the rewind rules over byte strings, for tests ----
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

// A writer for tests and tools; a worker's own is in proxy_client.
void bind_writer(py::module_& m) {
  py::class_<LogWriter>(m, "LogWriter",
                        "Appends records to a log (tests; a worker's own writer is in proxy_client).")
      .def(py::init<const std::string&>())
      .def_property_readonly("usable", &LogWriter::usable)
      .def_property_readonly("records", &LogWriter::records)
      .def_property_readonly("bytes", &LogWriter::bytes)
      .def("free_later", &LogWriter::free_later)
      .def(
          "put_template",
          [](LogWriter& w, const std::string& name, const std::vector<uint64_t>& key,
             const std::vector<uint64_t>& out) {
            return w.put_template(name, key.data(), key.size(), out.data(), out.size());
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "append",
          [](LogWriter& w, uint16_t kind, uint64_t aux, const std::vector<uint64_t>& body) {
            return w.append(static_cast<Kind>(kind), aux, body.size(), [&](uint64_t* to) {
              if (!body.empty()) std::memcpy(to, body.data(), 8 * body.size());
            });
          },
          py::call_guard<py::gil_scoped_release>())
      .def("call",
           [](LogWriter& w, uint16_t kind, uint64_t aux, const std::vector<uint64_t>& body) {
             std::string payload;
             {
               py::gil_scoped_release release;
               w.call(
                   static_cast<Kind>(kind), aux, body.size(),
                   [&](uint64_t* to) {
                     if (!body.empty()) std::memcpy(to, body.data(), 8 * body.size());
                   },
                   [&](const uint8_t* data, size_t bytes) {
                     payload.assign(reinterpret_cast<const char*>(data), bytes);
                   });
             }
             return py::bytes(payload);
           })
      .def("close", &LogWriter::close, py::call_guard<py::gil_scoped_release>());
}

template <class T>
uint64_t load(const std::atomic<T>& value) {
  return value.load(std::memory_order_acquire);
}

void bind_log(py::module_& m) {
#define READ(name) .def_property_readonly(#name, [](const LogMap& l) { return load(l.page().name); })
#define FIXED(name) .def_property_readonly(#name, [](const LogMap& l) { return l.page().name; })
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
  py::class_<LogMap>(m, "Log", "A rank's log, mapped.")
      .def(py::init<const std::string&>()) FIXED(rank) FIXED(world) FIXED(segment_bytes) FIXED(segment_count)
          FIXED(error_index) READ(tail) READ(tail_index) FIXED(dictionary_bytes) READ(dictionary_begin)
              READ(dictionary_tail) READ(cursor) READ(cursor_index) READ(passed_index) READ(awaited_index)
                  READ(phase) READ(step) READ(worker_steps) READ(call) READ(progress_ns) READ(freed_segments)
                      READ(backpressure) READ(in_collective) READ(degraded) READ(final_steps) READ(sealed)
                          READ(live_buffers) READ(live_bytes) READ(undo_bytes) READ(shadow_used_bytes)
                              READ(snapshot_used_bytes) READ(snapshot_failed) READ(snapshot_begun)
                                  READ(snapshots_taken) READ(snapshot_ns) READ(snapshot_huge_bytes)
                                      READ(replies_compared) READ(replies_different)
                                          READ(median_calls_per_step) READ(median_bytes_per_step)
                                              READ(commit_count) READ(session_state) READ(error_kind)
                                                  READ(device_lost) READ(wait_sequence) READ(validated_step)
                                                      READ(validations_failed)
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
          "snapshot_floor", [](const LogMap& l) { return load(l.page().snapshot_floor); },
          [](LogMap& l, uint64_t serial) {
            l.page().snapshot_floor.store(serial, std::memory_order_release);
          })
      .def_property(
          "log_kept_from", [](const LogMap& l) { return load(l.page().log_kept_from); },
          [](LogMap& l, uint64_t offset) { l.page().log_kept_from.store(offset, std::memory_order_release); })
      .def_property(
          "log_uncopied_from", [](const LogMap& l) { return load(l.page().log_uncopied_from); },
          [](LogMap& l, uint64_t from) { l.page().log_uncopied_from.store(from, std::memory_order_release); })
      .def_property(
          "describe_steps", [](const LogMap& l) { return load(l.page().describe_steps) != 0; },
          [](LogMap& l, bool on) { l.page().describe_steps.store(on ? 1 : 0, std::memory_order_release); })
      .def_property(
          "snapshot_suspended", [](const LogMap& l) { return load(l.page().snapshot_suspended) != 0; },
          [](LogMap& l, bool on) {
            l.page().snapshot_suspended.store(on ? 1 : 0, std::memory_order_release);
          })
      .def_property_readonly("snapshot_limit", [](const LogMap& l) { return l.snapshots().bytes; })
      .def_property_readonly("snapshot_ordered",
                             [](const LogMap& l) {
                               uint64_t newest = 0;
                               for (const auto& order : l.page().snapshot_orders)
                                 newest = std::max(newest, serial_of(load(order)));
                               return newest;
                             })
      .def(
          "describe_snapshot",
          [](LogMap& l, uint64_t serial) {
            l.page().snapshot_described[serial % kSnapshotOrders].store(serial, std::memory_order_release);
          },
          "The worker is to say what that snapshot consists of; to be called before it is ordered.")
      .def(
          "order_snapshot",
          [](LogMap& l, uint64_t serial, std::optional<uint64_t> step) {
            if (step && *step >= kAtNextCommit) throw LogError("no step can be that late");
            l.page().snapshot_orders[serial % kSnapshotOrders].store(
                order_of(serial, step.value_or(kAtNextCommit)), std::memory_order_release);
          },
          py::arg("serial"), py::arg("step") = py::none(),
          "A snapshot of the first commit with so many optimizer steps; without a step: of the next commit. "
          "It takes the place of the one SNAPSHOT_ORDERS serials before it.")
      .def("snapshots", &snapshots, "Published snapshots, oldest first.")
      .def("snapshot_contents", &read_contents, "Of a published snapshot; raises LogError.")
      .def("snapshot_holds", &snapshot_holds, "Whether what was read of it until now is its content.")
      .def("begin_restore", &begin_restore, py::arg("row"), py::arg("manifest"),
           "Withdraws all snapshots and says where the contents of a stored one go; raises LogError.")
      .def("finish_restore", &finish_restore, py::arg("serial"), py::arg("contents"),
           py::arg("checked") = std::vector<uint64_t>(),
           "Publishes it, now that its contents are there; raises LogError if they are not. `checked`: "
           "handles "
           "of buffers that need no other look.")
      .def(
          "lease_snapshots",
          [](LogMap& l, const std::vector<uint64_t>& serials) {
            if (serials.size() > kSnapshotLeases) throw LogError("too many snapshots are leased");
            for (size_t i = 0; i < kSnapshotLeases; i++)
              l.page().snapshot_leases[i].store(i < serials.size() ? serials[i] : 0);
          },
          "These, and no others, stay as they are while they are read.")
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
      .def("commits", &commits, "Commits still in the ring, oldest first.")
      .def("commit_rows", &short_rows, "Their rows: equal bytes are the same commit.")
      .def_static(
          "commit_of", [](const py::bytes& row) { return describe(decode_short_row(std::string_view(row))); },
          "A commit by such a row; raises LogError.")
      .def("digests", &digests, py::arg("commit"), py::arg("handles"),
           "XXH3-64 of these buffers at a commit, None for one without.")
      .def("manifest", &manifest_buffers, py::arg("commit"), "Buffers alive at a commit; none for commit 0.")
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
}

}  // namespace
}  // namespace understudy::replay

PYBIND11_MODULE(_replay, m) {
  using namespace understudy::replay;
  auto& log_error = py::register_exception<LogError>(m, "LogError", PyExc_RuntimeError);
  py::register_exception<RetiredTemplate>(m, "RetiredTemplate", log_error);
  py::register_exception<RemoteError>(m, "RemoteError", PyExc_RuntimeError);
  py::class_<CommitView>(m, "Commit")
      .def_readonly("number", &CommitView::number)
      .def_readonly("log_offset", &CommitView::log_offset)
      .def_readonly("record_index", &CommitView::record_index)
      .def_readonly("step", &CommitView::step)
      .def_readonly("call", &CommitView::call)
      .def_readonly("complete", &CommitView::complete)
      .def_readonly("has_manifest", &CommitView::has_manifest)
      .def_readonly("optimizer", &CommitView::optimizer)
      .def_readonly("communicators", &CommitView::communicators)
      .def_readonly("members", &CommitView::members)
      .def_readonly("step_digest", &CommitView::step_digest);
  py::class_<SnapshotView>(m, "Snapshot")
      .def_readonly("serial", &SnapshotView::serial)
      .def_readonly("bytes", &SnapshotView::bytes)
      .def_readonly("seconds", &SnapshotView::seconds)
      .def_readonly("commit", &SnapshotView::commit);
  py::class_<Contents>(m, "SnapshotContents", "Buffers and generators: (handle, bytes, digest, offset).")
      .def_readonly("commit", &Contents::commit)
      .def_readonly("row", &Contents::row)
      .def_readonly("manifest", &Contents::manifest)
      .def_readonly("buffers", &Contents::buffers)
      .def_readonly("generators", &Contents::generators);
  py::class_<Buffer>(m, "Buffer")
      .def_readonly("handle", &Buffer::handle)
      .def_readonly("bytes", &Buffer::bytes)
      .def_readonly("digest", &Buffer::digest)
      .def_readonly("shadowed", &Buffer::shadowed);
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
      "Makes the five files of a log (mode 0600) in an existing directory.");
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
  bind_log(m);
  bind_log_copy(m);
  bind_life_watch(m);
  bind_log_walk(m);
  bind_mirror(m);
  bind_writer(m);
  bind_rewind(m);
}
