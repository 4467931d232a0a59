#include "replay/csrc/tools/mirror.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "replay/csrc/log/futex.h"
#include "replay/csrc/rewind/marks.h"

namespace understudy::replay {
namespace {

struct Span {
  size_t begin, end;
  constexpr size_t words() const { return (end - begin) / 8; }
};

// All fields that worker and device server write but for drills and the session's state.
constexpr Span kWritten{offsetof(ControlPage, dictionary_begin), offsetof(ControlPage, session_state)};
constexpr Span kCommits{offsetof(ControlPage, commit_count), offsetof(ControlPage, segment_of)};
static_assert(kWritten.begin % 8 == 0 && kWritten.end % 8 == 0);
static_assert(kCommits.begin % 8 == 0 && kCommits.end % 8 == 0);
// What a device server of this host holds means nothing on another one.
static_assert(offsetof(ControlPage, server_life) >= kWritten.end &&
              offsetof(ControlPage, server_life) + sizeof(ControlPage::server_life) <= kCommits.begin);

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
  char lost_message[sizeof(ControlPage::lost_message)];
  uint64_t floor_commit, snapshot_floor, log_kept_from, log_uncopied_from, snapshot_suspended;
  uint64_t snapshot_leases[kSnapshotLeases], snapshot_orders[kSnapshotOrders];
  uint64_t snapshot_described[kSnapshotOrders], describe_steps, validate_step, drill_count;
  DrillOrder drills[kMaxDrills];
};

constexpr size_t kStateBytes =
    sizeof(StateHeader) + sizeof(DrillState64) * kMaxDrills + (kWritten.words() + kCommits.words()) * 8;

// Word by word: whoever writes meanwhile does so in words at most.
void load_words(const uint8_t* from, uint8_t* to, size_t words) {
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  for (size_t i = 0; i < words; i++) {
    const uint64_t word = __atomic_load_n(source + i, __ATOMIC_RELAXED);
    std::memcpy(to + 8 * i, &word, 8);
  }
}

void store_words(uint8_t* to, const uint8_t* from, size_t words) {
  auto* target = reinterpret_cast<uint64_t*>(to);
  for (size_t i = 0; i < words; i++) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    __atomic_store_n(target + i, word, __ATOMIC_RELAXED);
  }
}

uint8_t* bytes_of(const LogMap& log) { return reinterpret_cast<uint8_t*>(&log.page()); }

// What a copied control page says of communicators: for each row of `marks` how many there are.
class Counts {
 public:
  Counts(const uint8_t* written, const uint8_t* commits) : written_(written), commits_(commits) {}
  uint64_t of(uint64_t row) const {
    if (row == kStartedRow) return at<uint32_t>(written_, kWritten, offsetof(ControlPage, started_count));
    return at<uint32_t>(commits_, kCommits, entry(row) + offsetof(CommitEntry, communicators));
  }
  // Offset in the control page of the word that is another one, or 0, once the row tells of something else.
  static size_t name(uint64_t row) {
    return row < kCommitRing ? entry(row) + offsetof(CommitEntry, number) : serial(row);
  }

 private:
  template <class T>
  static T at(const uint8_t* copied, Span span, size_t offset) {
    T value;
    std::memcpy(&value, copied + offset - span.begin, sizeof value);
    return value;
  }
  static size_t serial(uint64_t row) {
    return offsetof(ControlPage, snapshots) + (row - kCommitRing) * sizeof(SnapshotEntry);
  }
  static size_t entry(uint64_t row) {
    return row < kCommitRing ? offsetof(ControlPage, commits) + row * sizeof(CommitEntry)
                             : serial(row) + offsetof(SnapshotEntry, commit);
  }

  const uint8_t *written_, *commits_;
};
static_assert(offsetof(SnapshotEntry, serial) == 0);

// Of the row of a commit or of a snapshot that is another one now, what was read was not all of one.
void forget_if_changed(size_t name, const LogMap& log, uint8_t* commits) {
  uint64_t now;
  load_words(bytes_of(log) + name, reinterpret_cast<uint8_t*>(&now), 1);
  uint8_t* const copied = commits + name - kCommits.begin;
  if (std::memcmp(copied, &now, sizeof now) != 0) std::memset(copied, 0, sizeof now);
}

void put_marks(LogMap& mirror, const uint8_t* written, std::string_view rest) {
  const Counts counts(written, written + kWritten.words() * 8);
  for (uint64_t row = 0; row < kMarkRows; row++) {
    Marks marks(further_marks(counts.of(row)));
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
  const ControlPage& p = log.page();
  std::vector<uint8_t> found(kStateBytes);
  uint8_t* to = found.data();
  // What counts commits and drills is read before them.
  const uint64_t commits = p.commit_count.load(std::memory_order_acquire);
  const StateHeader header{kVersion, p.session_state.load(std::memory_order_acquire),
                           std::min<uint64_t>(p.drill_count.load(std::memory_order_acquire), kMaxDrills)};
  std::memcpy(to, &header, sizeof header);
  to += sizeof header;
  for (uint64_t i = 0; i < kMaxDrills; i++, to += sizeof(DrillState64)) {
    DrillState64 drill{};
    if (i < header.drill_count) {
      drill.state = p.drills[i].state.load(std::memory_order_acquire);
      drill.fired_at_ns = p.drills[i].fired_at_ns;
      drill.detail = p.drills[i].detail;
    }
    std::memcpy(to, &drill, sizeof drill);
  }
  const Counts counts(to, to + kWritten.words() * 8);
  load_words(bytes_of(log) + kWritten.begin, to, kWritten.words());
  to += kWritten.words() * 8;
  std::atomic_thread_fence(std::memory_order_acquire);
  load_words(bytes_of(log) + kCommits.begin, to, kCommits.words());
  std::memcpy(to, &commits, sizeof commits);
  Marks more;
  for (uint64_t row = 0; row < kMarkRows; row++) {
    const Marks of_row = read_more_marks(log, row, counts.of(row));
    more.insert(more.end(), of_row.begin(), of_row.end());
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!of_row.empty() && row != kStartedRow) forget_if_changed(Counts::name(row), log, to);
  }
  if (!more.empty()) {
    found.resize(kStateBytes + more.size() * sizeof(CommunicatorMark));
    std::memcpy(found.data() + kStateBytes, more.data(), more.size() * sizeof(CommunicatorMark));
  }
  return found;
}

void apply_control_state(LogMap& mirror, std::string_view state, int64_t clock_offset_ns) {
  ControlPage& p = mirror.page();
  if (state.size() < kStateBytes) throw LogError("the state of a control page has another size");
  const auto* from = reinterpret_cast<const uint8_t*>(state.data());
  StateHeader header;
  std::memcpy(&header, from, sizeof header);
  if (header.version != kVersion) throw LogError("the state of a control page is of another version");
  from += sizeof header;
  const uint64_t known = std::min<uint64_t>(p.drill_count.load(), kMaxDrills);
  for (uint64_t i = 0; i < kMaxDrills; i++, from += sizeof(DrillState64)) {
    DrillState64 drill;
    std::memcpy(&drill, from, sizeof drill);
    if (i >= std::min(known, header.drill_count) || drill.state <= p.drills[i].state.load()) continue;
    p.drills[i].fired_at_ns = drill.fired_at_ns + clock_offset_ns;
    p.drills[i].detail = drill.detail;
    p.drills[i].state.store(std::min<uint64_t>(drill.state, 2), std::memory_order_release);
  }
  put_marks(mirror, from, state.substr(kStateBytes));
  store_words(bytes_of(mirror) + kWritten.begin, from, kWritten.words());
  p.progress_ns.fetch_add(clock_offset_ns);
  from += kWritten.words() * 8;
  store_words(bytes_of(mirror) + kCommits.begin, from, kCommits.words());
  if (p.session_state.load() == 0 && header.session_state <= static_cast<uint64_t>(SessionState::kClosed))
    p.session_state.store(static_cast<uint32_t>(header.session_state), std::memory_order_release);
}

std::vector<uint8_t> control_orders(const LogMap& mirror) {
  const ControlPage& p = mirror.page();
  std::vector<uint8_t> found(sizeof(Orders));
  auto* o = new (found.data()) Orders{};
  o->version = kVersion;
  o->lost = p.session_state.load(std::memory_order_acquire) == static_cast<uint32_t>(SessionState::kLost);
  std::memcpy(o->lost_message, p.lost_message, sizeof o->lost_message);
  o->floor_commit = p.floor_commit;
  o->snapshot_floor = p.snapshot_floor;
  o->log_kept_from = p.log_kept_from;
  o->log_uncopied_from = p.log_uncopied_from;
  o->snapshot_suspended = p.snapshot_suspended;
  for (uint64_t i = 0; i < kSnapshotLeases; i++) o->snapshot_leases[i] = p.snapshot_leases[i];
  for (uint64_t i = 0; i < kSnapshotOrders; i++) {
    o->snapshot_orders[i] = p.snapshot_orders[i];
    o->snapshot_described[i] = p.snapshot_described[i];
  }
  o->describe_steps = p.describe_steps;
  o->validate_step = p.validate_step;
  o->drill_count = std::min<uint64_t>(p.drill_count.load(std::memory_order_acquire), kMaxDrills);
  for (uint64_t i = 0; i < o->drill_count; i++)
    o->drills[i] = {p.drills[i].kind, p.drills[i].step, p.drills[i].call,
                    p.drills[i].state.load() == static_cast<uint32_t>(DrillState::kDone)};
  return found;
}

void apply_control_orders(LogMap& log, std::string_view orders) {
  if (orders.size() != sizeof(Orders)) throw LogError("the orders for a control page have another size");
  Orders o;
  std::memcpy(&o, orders.data(), sizeof o);
  if (o.version != kVersion) throw LogError("the orders for a control page are of another version");
  ControlPage& p = log.page();
  p.snapshot_suspended = o.snapshot_suspended != 0;
  p.log_kept_from = o.log_kept_from;
  p.log_uncopied_from = o.log_uncopied_from;
  for (uint64_t i = 0; i < kSnapshotLeases; i++) p.snapshot_leases[i] = o.snapshot_leases[i];
  for (uint64_t i = 0; i < kSnapshotOrders; i++) {
    p.snapshot_described[i] = o.snapshot_described[i];
    p.snapshot_orders[i].store(o.snapshot_orders[i], std::memory_order_release);
  }
  p.describe_steps = o.describe_steps != 0;
  p.validate_step = o.validate_step;
  p.snapshot_floor = o.snapshot_floor;
  p.floor_commit = o.floor_commit;
  const uint64_t count = std::min<uint64_t>(o.drill_count, kMaxDrills);
  for (uint64_t i = 0; i < count; i++) {
    if (i >= p.drill_count.load()) {
      p.drills[i].kind = static_cast<uint32_t>(o.drills[i].kind);
      p.drills[i].step = o.drills[i].step;
      p.drills[i].call = o.drills[i].call;
      p.drills[i].fired_at_ns = p.drills[i].detail = 0;
      p.drills[i].state.store(0);
      p.drill_count.store(static_cast<uint32_t>(i + 1), std::memory_order_release);
    }
    if (o.drills[i].done != 0) p.drills[i].state.store(static_cast<uint32_t>(DrillState::kDone));
  }
  if (o.lost != 0 && p.session_state.load() == 0) lose_session(log, text_of(o.lost_message));
}

Place manifest_place(const LogMap& log, uint64_t commit) {
  const CommitEntry e = copy_once(log.page().commits[commit % kCommitRing]);
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
  ControlPage& p = log.page();
  std::strncpy(p.lost_message, message.c_str(), sizeof p.lost_message - 1);
  p.session_state.store(static_cast<uint32_t>(SessionState::kLost), std::memory_order_release);
  for (auto* futex : {&p.reply_futex, &p.freed_futex, &p.tail_futex}) {
    futex->fetch_add(1);
    futex_wake(*futex);
  }
}

}  // namespace understudy::replay
