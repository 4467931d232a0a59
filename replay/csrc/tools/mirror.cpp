#include "replay/csrc/tools/mirror.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "replay/csrc/log/futex.h"
#include "replay/csrc/rewind/marks.h"

namespace understudy::replay {
namespace {

struct DrillState64 {
  uint64_t state, fired_at_ns, detail;
};

struct StateHeader {
  uint64_t version, session_state, drill_count;
};

struct DrillOrder {
  uint64_t kind, step, call, done;
};

struct Orders {
  uint64_t version, lost;
  char lost_message[sizeof(SharedPart::lost_message)];
  uint64_t floor_commit, snapshot_floor, log_kept_from, log_uncopied_from, snapshot_suspended;
  uint64_t snapshot_leases[kSnapshotLeases], snapshot_orders[kSnapshotOrders];
  uint64_t snapshot_described[kSnapshotOrders], describe_steps, validate_step, drill_count;
  DrillOrder drills[kMaxDrills];
};

// Behind the header: drills, then all that the worker and the device server write.
constexpr size_t kStateBytes =
    sizeof(StateHeader) + sizeof(DrillState64) * kMaxDrills + sizeof(WorkerPart) + sizeof(ServerPart);

// Word by word, in their order: whoever writes meanwhile does so in words at most, and what counts something
// lies in front of it.
template <class Part>
void load_part(const Part& shared, Part& copy) {
  static_assert(sizeof(Part) % 8 == 0);
  const auto* const from = reinterpret_cast<const uint64_t*>(&shared);
  auto* const to = reinterpret_cast<uint8_t*>(&copy);
  for (size_t i = 0; i < sizeof(Part) / 8; i++) {
    const uint64_t word = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
    std::memcpy(to + 8 * i, &word, 8);
  }
}

template <class Part>
void store_part(Part& shared, const Part& copy) {
  const auto* const from = reinterpret_cast<const uint8_t*>(&copy);
  auto* const to = reinterpret_cast<uint64_t*>(&shared);
  for (size_t i = 0; i < sizeof(Part) / 8; i++) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    __atomic_store_n(to + i, word, __ATOMIC_RELAXED);
  }
}

// What worker and device server have written: a copy of this process's own.
struct Copied {
  WorkerPart worker;
  ServerPart server;

  // How many communicators a row of `marks` is about.
  uint64_t communicators(uint64_t row) const {
    if (row == kStartedRow) return server.started_count.load(std::memory_order_relaxed);
    return row < kCommitRing ? server.commits[row].communicators
                             : server.snapshots[row - kCommitRing].commit.communicators;
  }
};

// Of the row of a commit or of a snapshot that is another one now, what was read was not all of one.
void forget_if_changed(uint64_t row, const ServerPart& now, ServerPart& copied) {
  if (row < kCommitRing) {
    uint64_t& number = copied.commits[row].number;
    if (__atomic_load_n(&now.commits[row].number, __ATOMIC_RELAXED) != number) number = 0;
  } else {
    std::atomic<uint64_t>& serial = copied.snapshots[row - kCommitRing].serial;
    if (now.snapshots[row - kCommitRing].serial.load(std::memory_order_relaxed) != serial) serial = 0;
  }
}

void put_marks(LogMap& mirror, const Copied& copied, std::string_view rest) {
  for (uint64_t row = 0; row < kMarkRows; row++) {
    Marks marks(further_marks(copied.communicators(row)));
    const size_t bytes = marks.size() * sizeof(CommunicatorMark);
    if (bytes > rest.size())
      throw LogError("the state of a control page names more communicators than it has");
    if (bytes != 0) std::memcpy(marks.data(), rest.data(), bytes);
    rest.remove_prefix(bytes);
    if (!write_more_marks(mirror, row, marks))
      throw LogError("no shared memory for what is told of communicators");
  }
}

}  // namespace

std::vector<uint8_t> control_state(const LogMap& log) {
  const ReaderPage p = log.page();
  std::vector<uint8_t> found(kStateBytes);
  uint8_t* to = found.data();
  const auto put = [&to](const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  };
  // What counts commits and drills is read before them.
  const uint64_t commits = p.server().commit_count.load(std::memory_order_acquire);
  const StateHeader header{
      kVersion, p.shared().session_state.load(std::memory_order_acquire),
      std::min<uint64_t>(p.daemon().drill_count.load(std::memory_order_acquire), kMaxDrills)};
  put(&header, sizeof header);
  for (uint64_t i = 0; i < kMaxDrills; i++) {
    DrillState64 drill{};
    if (i < header.drill_count) {
      const Drill& d = p.shared().drills[i];
      drill.state = d.state.load(std::memory_order_acquire);
      drill.fired_at_ns = d.fired_at_ns;
      drill.detail = d.detail;
    }
    put(&drill, sizeof drill);
  }
  const auto copied = std::make_unique<Copied>();
  load_part(p.worker(), copied->worker);
  load_part(p.server(), copied->server);
  copied->server.commit_count = commits;
  Marks more;
  for (uint64_t row = 0; row < kMarkRows; row++) {
    const Marks of_row = read_more_marks(log, row, copied->communicators(row));
    more.insert(more.end(), of_row.begin(), of_row.end());
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!of_row.empty() && row != kStartedRow) forget_if_changed(row, p.server(), copied->server);
  }
  put(&copied->worker, sizeof copied->worker);
  put(&copied->server, sizeof copied->server);
  const auto* const marks = reinterpret_cast<const uint8_t*>(more.data());
  found.insert(found.end(), marks, marks + more.size() * sizeof(CommunicatorMark));
  return found;
}

void apply_control_state(LogMap& mirror, std::string_view state, int64_t clock_offset_ns) {
  const MakerPage p = mirror.maker_page();
  if (state.size() < kStateBytes) throw LogError("the state of a control page has another size");
  const char* from = state.data();
  const auto take = [&from](void* to, size_t bytes) {
    std::memcpy(to, from, bytes);
    from += bytes;
  };
  StateHeader header;
  take(&header, sizeof header);
  if (header.version != kVersion) throw LogError("the state of a control page is of another version");
  const uint64_t known = std::min<uint64_t>(p.daemon().drill_count.load(), kMaxDrills);
  for (uint64_t i = 0; i < kMaxDrills; i++) {
    DrillState64 drill;
    take(&drill, sizeof drill);
    Drill& d = p.shared().drills[i];
    if (i >= std::min(known, header.drill_count) || drill.state <= d.state.load()) continue;
    d.fired_at_ns = drill.fired_at_ns + clock_offset_ns;
    d.detail = drill.detail;
    d.state.store(std::min<uint64_t>(drill.state, 2), std::memory_order_release);
  }
  const auto copied = std::make_unique<Copied>();
  take(&copied->worker, sizeof copied->worker);
  take(&copied->server, sizeof copied->server);
  copied->server.progress_ns += clock_offset_ns;
  put_marks(mirror, *copied, state.substr(kStateBytes));
  store_part(p.worker(), copied->worker);
  store_part(p.server(), copied->server);
  if (p.shared().session_state.load() == 0 &&
      header.session_state <= static_cast<uint64_t>(SessionState::kClosed))
    p.shared().session_state.store(static_cast<uint32_t>(header.session_state), std::memory_order_release);
}

std::vector<uint8_t> control_orders(const LogMap& mirror) {
  const ReaderPage p = mirror.page();
  std::vector<uint8_t> found(sizeof(Orders));
  auto* o = new (found.data()) Orders{};
  o->version = kVersion;
  o->lost =
      p.shared().session_state.load(std::memory_order_acquire) == static_cast<uint32_t>(SessionState::kLost);
  std::memcpy(o->lost_message, p.shared().lost_message, sizeof o->lost_message);
  o->floor_commit = p.shared().floor_commit;
  o->snapshot_floor = p.daemon().snapshot_floor;
  o->log_kept_from = p.daemon().log_kept_from;
  o->log_uncopied_from = p.daemon().log_uncopied_from;
  o->snapshot_suspended = p.daemon().snapshot_suspended;
  for (uint64_t i = 0; i < kSnapshotLeases; i++) o->snapshot_leases[i] = p.daemon().snapshot_leases[i];
  for (uint64_t i = 0; i < kSnapshotOrders; i++) {
    o->snapshot_orders[i] = p.daemon().snapshot_orders[i];
    o->snapshot_described[i] = p.daemon().snapshot_described[i];
  }
  o->describe_steps = p.daemon().describe_steps;
  o->validate_step = p.shared().validate_step;
  o->drill_count = std::min<uint64_t>(p.daemon().drill_count.load(std::memory_order_acquire), kMaxDrills);
  for (uint64_t i = 0; i < o->drill_count; i++)
    o->drills[i] = {p.shared().drills[i].kind, p.shared().drills[i].step, p.shared().drills[i].call,
                    p.shared().drills[i].state.load() == static_cast<uint32_t>(DrillState::kDone)};
  return found;
}

void apply_control_orders(LogMap& log, std::string_view orders) {
  if (orders.size() != sizeof(Orders)) throw LogError("the orders for a control page have another size");
  Orders o;
  std::memcpy(&o, orders.data(), sizeof o);
  if (o.version != kVersion) throw LogError("the orders for a control page are of another version");
  const DaemonPage p = log.daemon_page();
  p.daemon().snapshot_suspended = o.snapshot_suspended != 0;
  p.daemon().log_kept_from = o.log_kept_from;
  p.daemon().log_uncopied_from = o.log_uncopied_from;
  for (uint64_t i = 0; i < kSnapshotLeases; i++) p.daemon().snapshot_leases[i] = o.snapshot_leases[i];
  for (uint64_t i = 0; i < kSnapshotOrders; i++) {
    p.daemon().snapshot_described[i] = o.snapshot_described[i];
    p.daemon().snapshot_orders[i].store(o.snapshot_orders[i], std::memory_order_release);
  }
  p.daemon().describe_steps = o.describe_steps != 0;
  p.shared().validate_step = o.validate_step;
  p.daemon().snapshot_floor = o.snapshot_floor;
  p.shared().floor_commit = o.floor_commit;
  const uint64_t count = std::min<uint64_t>(o.drill_count, kMaxDrills);
  for (uint64_t i = 0; i < count; i++) {
    if (i >= p.daemon().drill_count.load()) {
      p.shared().drills[i].kind = static_cast<uint32_t>(o.drills[i].kind);
      p.shared().drills[i].step = o.drills[i].step;
      p.shared().drills[i].call = o.drills[i].call;
      p.shared().drills[i].fired_at_ns = p.shared().drills[i].detail = 0;
      p.shared().drills[i].state.store(0);
      p.daemon().drill_count.store(static_cast<uint32_t>(i + 1), std::memory_order_release);
    }
    if (o.drills[i].done != 0) p.shared().drills[i].state.store(static_cast<uint32_t>(DrillState::kDone));
  }
  if (o.lost != 0 && p.shared().session_state.load() == 0) lose_session(log, text_of(o.lost_message));
}

Place manifest_place(const LogMap& log, uint64_t commit) {
  const CommitEntry e = copy_once(log.page().server().commits[commit % kCommitRing]);
  if (commit == 0 || e.number != commit)
    throw LogError("commit " + std::to_string(commit) + " is not in the ring");
  if (e.manifest_bytes > log.shadow_bytes() || e.manifest_offset > log.shadow_bytes() - e.manifest_bytes)
    throw LogError("a manifest lies outside of the shadow area");
  return {e.manifest_offset, e.manifest_bytes};
}

std::vector<uint8_t> copy_shadow(const LogMap& log, uint64_t offset, uint64_t bytes) {
  if (bytes > log.shadow_bytes() || offset > log.shadow_bytes() - bytes)
    throw LogError("that lies outside of the shadow area");
  return {log.shadow() + offset, log.shadow() + offset + bytes};
}

void put_shadow(LogMap& mirror, uint64_t offset, std::string_view content) {
  if (content.size() > mirror.shadow_bytes() || offset > mirror.shadow_bytes() - content.size())
    throw LogError("that lies outside of the shadow area");
  if (!reserve_memory(mirror.shadow() + offset, content.size()))
    throw LogError("no shared memory for a manifest");
  std::memcpy(mirror.shadow() + offset, content.data(), content.size());
}

void lose_session(LogMap& log, const std::string& message) {
  const DaemonPage p = log.daemon_page();
  std::strncpy(p.shared().lost_message, message.c_str(), sizeof p.shared().lost_message - 1);
  p.shared().session_state.store(static_cast<uint32_t>(SessionState::kLost), std::memory_order_release);
  for (auto* futex : {&p.shared().reply_futex, &p.shared().freed_futex, &p.shared().tail_futex}) {
    futex->fetch_add(1);
    futex_wake(*futex);
  }
}

}  // namespace understudy::replay
