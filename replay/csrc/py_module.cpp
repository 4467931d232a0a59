// The module replay._replay: the log for the tools (proxyd, recoveryctl), the rewind rules for tests. No
// PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "replay/csrc/digest.h"
#include "replay/csrc/log_writer.h"
#include "replay/csrc/manifest.h"
#include "replay/csrc/names.h"
#include "replay/csrc/rewind.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

struct Commit {
  uint64_t number, log_offset, record_index, step, call;
  bool complete, has_manifest;
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> communicators;
};

struct Buffer {
  uint64_t handle, bytes;
  std::optional<uint64_t> digest;
  bool shadowed;
};

std::vector<Commit> commits(const LogMap& log) {
  const ControlPage& page = log.page();
  std::vector<Commit> found;
  const uint64_t newest = page.commit_count.load(std::memory_order_acquire);
  const uint64_t oldest = newest > kCommitRing - 1 ? newest - (kCommitRing - 1) + 1 : 1;
  for (uint64_t n = oldest; n <= newest; n++) {
    const CommitEntry& e = page.commits[n % kCommitRing];
    if (e.number != n) continue;
    Commit c{e.number,
             e.log_offset,
             e.record_index,
             e.step,
             e.call,
             (e.flags & kCommitComplete) != 0,
             e.manifest_bytes != 0,
             {}};
    for (uint32_t i = 0; i < std::min<uint64_t>(e.communicators, kMaxCommunicators); i++)
      c.communicators.emplace_back(e.communicator[i].uid_low, e.communicator[i].uid_high,
                                   e.communicator[i].sequence);
    std::atomic_thread_fence(std::memory_order_acquire);
    // The server may have reused the entry while we read it.
    if (page.commit_count.load() < n + kCommitRing - 1) found.push_back(std::move(c));
  }
  return found;
}

const CommitEntry& commit_entry(const LogMap& log, uint64_t number) {
  const CommitEntry& e = log.page().commits[number % kCommitRing];
  if (number == 0 || e.number != number)
    throw LogError("commit " + std::to_string(number) + " is not in the ring");
  return e;
}

std::vector<Buffer> manifest_buffers(const LogMap& log, uint64_t number) {
  std::vector<Buffer> found;
  if (number == 0) return found;
  const Manifest manifest = Manifest::read(log, commit_entry(log, number));
  for (const ManifestBuffer& b : manifest.buffers)
    found.push_back({b.handle, b.bytes, b.has_digest == 1 ? std::optional(b.digest) : std::nullopt,
                     b.shadow_offset != kNotShadowed || b.has_digest == 2});
  return found;
}

std::string template_name(const LogMap& log, uint64_t offset) {
  const uint64_t tail =
      std::min(log.page().dictionary_tail.load(std::memory_order_acquire), log.dictionary_bytes());
  if (offset % 8 != 0 || offset + sizeof(TemplateHeader) > tail) return "?";
  const auto* header = reinterpret_cast<const TemplateHeader*>(log.dictionary() + offset);
  if (header->name_bytes > tail - offset - sizeof(TemplateHeader)) return "?";
  return std::string(reinterpret_cast<const char*>(header + 1), header->name_bytes);
}

// Records still in the log, as dictionaries; [first, first + count) by index.
py::list dump(const LogMap& log, std::optional<uint64_t> first, std::optional<uint64_t> count) {
  py::list found;
  const ControlPage& page = log.page();
  const uint64_t tail = page.tail.load(std::memory_order_acquire);
  uint64_t offset = page.freed_segments.load(std::memory_order_acquire) * log.segment_bytes();
  while (offset < tail && (!count || found.size() < *count)) {
    const Record& r = log.record(offset, tail);
    const uint64_t here = offset;
    offset += r.bytes;
    if (static_cast<Kind>(r.kind) == Kind::kPad || (first && r.index < *first)) continue;
    py::dict row;
    row["index"] = r.index;
    row["offset"] = here;
    row["bytes"] = r.bytes;
    row["kind"] = name_of(static_cast<Kind>(r.kind));
    row["aux"] = r.aux;
    std::vector<uint64_t> frees(r.body(), r.body() + r.frees);
    row["frees"] = frees;
    row["done"] = here < page.cursor.load(std::memory_order_relaxed);
    const auto kind = static_cast<Kind>(r.kind);
    const uint64_t words = (r.bytes - sizeof(Record)) / 8 - r.frees;
    const uint64_t* body = r.body() + r.frees;
    if (kind == Kind::kOperator || kind == Kind::kOperatorSync) row["operator"] = template_name(log, r.aux);
    if (kind == Kind::kCollective && words >= sizeof(CollectiveHeader) / 8) {
      const auto* header = reinterpret_cast<const CollectiveHeader*>(body);
      row["operator"] = name_of(static_cast<CollectiveKind>(header->kind));
      row["sequence"] = header->sequence;
    }
    std::vector<uint64_t> values(body, body + std::min<uint64_t>(words, 16));
    row["words"] = values;
    found.append(row);
  }
  return found;
}

// ---- the rewind rules over byte strings, for tests ----
struct ByteStore {
  std::string copy(const std::string& s) { return s; }
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
      .def("create", [](ByteTable& t, uint64_t h, const py::bytes& c) { t.table.create(h, std::string(c)); })
      .def("write",
           [](ByteTable& t, uint64_t h, const py::bytes& c) { t.table.write(h).content = std::string(c); })
      .def("replace",
           [](ByteTable& t, uint64_t h, const py::bytes& c) { t.table.replace(h, std::string(c)); })
      .def("read", [](ByteTable& t, uint64_t h) { return py::bytes(t.table.read(h).content); })
      .def("free", [](ByteTable& t, uint64_t h) { t.table.free(h); })
      .def("commit", [](ByteTable& t) { return t.table.commit(); })
      .def("release", [](ByteTable& t, uint64_t floor) { t.table.release(floor); })
      .def("rewind", [](ByteTable& t, uint64_t target) { return t.table.rewind(target); })
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
      .def("put_template",
           [](LogWriter& w, const std::string& name, const std::vector<uint64_t>& key,
              const std::vector<uint64_t>& out) {
             return w.put_template(name, key.data(), key.size(), out.data(), out.size());
           })
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
  py::class_<LogMap>(m, "Log", "A rank's log, mapped.")
      .def(py::init<const std::string&>()) FIXED(rank) FIXED(world) FIXED(segment_bytes) FIXED(segment_count)
          FIXED(error_index) READ(tail) READ(tail_index) READ(dictionary_tail) READ(cursor) READ(cursor_index)
              READ(phase) READ(step) READ(call) READ(progress_ns) READ(freed_segments) READ(backpressure)
                  READ(in_collective) READ(degraded) READ(live_buffers) READ(live_bytes) READ(undo_bytes)
                      READ(shadow_used_bytes) READ(replies_compared) READ(replies_different)
                          READ(median_calls_per_step) READ(median_bytes_per_step) READ(commit_count)
                              READ(session_state) READ(error_kind)
      .def_property_readonly("error_operator",
                             [](const LogMap& l) {
                               const auto& p = l.page();
                               return std::string(p.error_operator,
                                                  strnlen(p.error_operator, sizeof p.error_operator));
                             })
      .def_property_readonly("error_message",
                             [](const LogMap& l) {
                               const auto& p = l.page();
                               return std::string(p.error_message,
                                                  strnlen(p.error_message, sizeof p.error_message));
                             })
      .def_property(
          "floor_commit", [](const LogMap& l) { return load(l.page().floor_commit); },
          [](LogMap& l, uint64_t floor) { l.page().floor_commit.store(floor, std::memory_order_release); })
      .def(
          "lose",
          [](LogMap& l, const std::string& message) {
            ControlPage& p = l.page();
            std::strncpy(p.lost_message, message.c_str(), sizeof p.lost_message - 1);
            p.session_state.store(static_cast<uint32_t>(SessionState::kLost), std::memory_order_release);
            for (auto* futex : {&p.reply_futex, &p.freed_futex, &p.tail_futex}) {
              futex->fetch_add(1);
              futex_wake(*futex);
            }
          },
          "Ends the session; the worker raises `message` at its next call.")
      .def("commits", &commits, "Commits still in the ring, oldest first.")
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
             p.drills[n].state.store(0);
             p.drill_count.store(n + 1, std::memory_order_release);
           })
      .def("drills",
           [](const LogMap& l) {
             std::vector<std::tuple<uint32_t, uint64_t, uint64_t, bool, uint64_t>> found;
             const ControlPage& p = l.page();
             for (uint32_t i = 0; i < std::min<uint64_t>(p.drill_count.load(), kMaxDrills); i++)
               found.emplace_back(p.drills[i].kind, p.drills[i].step, p.drills[i].call,
                                  p.drills[i].state.load() != 0, p.drills[i].fired_at_ns);
             return found;
           })
      .def("dump", &dump, py::arg("first") = py::none(), py::arg("count") = py::none())
      .def_static("now_ns", &now_ns, "CLOCK_MONOTONIC, nanoseconds.");
#undef READ
#undef FIXED
}

}  // namespace
}  // namespace understudy::replay

PYBIND11_MODULE(_replay, m) {
  using namespace understudy::replay;
  py::register_exception<LogError>(m, "LogError", PyExc_RuntimeError);
  py::register_exception<RemoteError>(m, "RemoteError", PyExc_RuntimeError);
  py::class_<Commit>(m, "Commit")
      .def_readonly("number", &Commit::number)
      .def_readonly("log_offset", &Commit::log_offset)
      .def_readonly("record_index", &Commit::record_index)
      .def_readonly("step", &Commit::step)
      .def_readonly("call", &Commit::call)
      .def_readonly("complete", &Commit::complete)
      .def_readonly("has_manifest", &Commit::has_manifest)
      .def_readonly("communicators", &Commit::communicators);
  py::class_<Buffer>(m, "Buffer")
      .def_readonly("handle", &Buffer::handle)
      .def_readonly("bytes", &Buffer::bytes)
      .def_readonly("digest", &Buffer::digest)
      .def_readonly("shadowed", &Buffer::shadowed);
  m.def(
      "create_log",
      [](const std::string& directory, uint32_t rank, uint32_t world, uint64_t segment_bytes,
         uint64_t segment_count, uint64_t dictionary_bytes, uint64_t reply_bytes, uint64_t shadow_bytes,
         int32_t proxyd_pid, uint64_t proxyd_start_ticks) {
        create_log(directory, rank, world,
                   {segment_bytes, segment_count, dictionary_bytes, reply_bytes, shadow_bytes}, proxyd_pid,
                   proxyd_start_ticks);
      },
      py::arg("directory"), py::kw_only(), py::arg("rank") = 0, py::arg("world") = 1,
      py::arg("segment_bytes") = LogSizes{}.segment_bytes,
      py::arg("segment_count") = LogSizes{}.segment_count,
      py::arg("dictionary_bytes") = LogSizes{}.dictionary_bytes,
      py::arg("reply_bytes") = LogSizes{}.reply_bytes, py::arg("shadow_bytes") = LogSizes{}.shadow_bytes,
      py::arg("proxyd_pid") = 0, py::arg("proxyd_start_ticks") = 0,
      "Makes the four files of a log (mode 0600) in an existing directory.");
  m.def("digest", [](const py::bytes& b) {
    const std::string_view text(b);
    return digest(text.data(), text.size());
  });
  m.def("process_start_ticks", &process_start_ticks);
  m.def("process_is_alive", &process_is_alive);
  m.attr("COMMIT_RING") = kCommitRing;
  bind_log(m);
  bind_writer(m);
  bind_rewind(m);
}
