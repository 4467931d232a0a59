#include "replay/csrc/tools/log_view.h"

#include <algorithm>

#include "replay/csrc/log/names.h"
#include "replay/csrc/log/templates.h"

namespace understudy::replay {
namespace {

CommitRow snapshot_row(const LogMap& log, uint64_t slot) {
  CommitRow row{copy_once(log.page().server().snapshots[slot].commit), {}};
  row.more = read_more_marks(log, mark_row_of_snapshot(slot), row.communicators);
  return row;
}

}  // namespace

CommitView describe(const CommitRow& e) {
  CommitView c{e.number,
               e.log_offset,
               e.record_index,
               e.step,
               e.call,
               (e.flags & kCommitComplete) != 0,
               e.manifest_bytes != 0,
               (e.flags & kCommitOptimizer) != 0,
               {},
               {},
               e.step_digest};
  const auto add = [&c](const CommunicatorMark& mark) {
    c.communicators.emplace_back(mark.uid_low, mark.uid_high, mark.sequence);
    c.members.push_back(mark.members);
  };
  std::for_each_n(e.communicator, std::min<uint64_t>(e.communicators, kMarksInPlace), add);
  std::for_each(e.more.begin(), e.more.end(), add);
  return c;
}

std::vector<CommitView> commits(const LogMap& log) {
  std::vector<CommitView> found;
  for (const CommitRow& row : commit_rows(log)) found.push_back(describe(row));
  return found;
}

std::vector<CommitRow> commit_rows(const LogMap& log) {
  const ReaderPage page = log.page();
  std::vector<CommitRow> found;
  const uint64_t newest = page.server().commit_count.load(std::memory_order_acquire);
  const uint64_t most = std::min<uint64_t>(newest, kCommitRing - 1);
  for (uint64_t left = most; left > 0; left--) {
    const uint64_t n = newest - left + 1;
    CommitRow row{copy_once(page.server().commits[n % kCommitRing]), {}};
    if (row.number != n || row.communicators > kMaxCommunicators) continue;  // no cut can be found with it
    row.more = read_more_marks(log, mark_row_of_commit(n), row.communicators);
    std::atomic_thread_fence(std::memory_order_acquire);
    // The server may have reused the entry while we read it.
    if (page.server().commit_count.load() - n < kCommitRing - 1) found.push_back(std::move(row));
  }
  return found;
}

std::vector<SnapshotView> snapshots(const LogMap& log) {
  std::vector<SnapshotView> found;
  for (uint64_t slot = 0; slot < kSnapshots; slot++) {
    const SnapshotEntry& e = log.page().server().snapshots[slot];
    const uint64_t serial = e.serial.load(std::memory_order_acquire);
    if (serial == 0) continue;
    SnapshotView s{serial, e.bytes, static_cast<double>(e.nanoseconds) / 1e9,
                   describe(snapshot_row(log, slot))};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (e.serial.load() == serial) found.push_back(std::move(s));  // else it was replaced meanwhile
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.serial < b.serial; });
  return found;
}

SnapshotContents snapshot_contents(const LogMap& log, uint64_t serial) {
  for (uint64_t slot = 0; slot < kSnapshots; slot++) {
    if (serial == 0 || log.page().server().snapshots[slot].serial.load(std::memory_order_acquire) != serial)
      continue;
    const CommitRow commit = snapshot_row(log, slot);
    SnapshotContents found{commit, Manifest::read(log.snapshots(), commit)};
    if (snapshot_holds(log, serial)) return found;
  }
  throw LogError("snapshot " + std::to_string(serial) + " is not there any more");
}

bool snapshot_holds(const LogMap& log, uint64_t serial) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return serial != 0 &&
         std::any_of(std::begin(log.page().server().snapshots), std::end(log.page().server().snapshots),
                     [&](const SnapshotEntry& e) { return e.serial.load() == serial; });
}

CommitRow commit_row(const LogMap& log, uint64_t number) {
  CommitRow row{commit_entry(log, number), {}};
  if (row.communicators > kMaxCommunicators)
    throw LogError("commit " + std::to_string(number) + " does not name all communicators");
  row.more = read_more_marks(log, mark_row_of_commit(number), row.communicators);
  if (commit_entry(log, number).log_offset != row.log_offset)
    throw LogError("another commit took the place of commit " + std::to_string(number));
  return row;
}

CommitEntry commit_entry(const LogMap& log, uint64_t number) {
  const CommitEntry e = copy_once(log.page().server().commits[number % kCommitRing]);
  if (number == 0 || e.number != number)
    throw LogError("commit " + std::to_string(number) + " is not in the ring");
  return e;
}

std::string template_name(const LogMap& log, uint64_t id) {
  try {
    return read_template(log, id).name;
  } catch (const LogError&) {
    return "?";
  }
}

RecordView view_record(const LogMap& log, const LogReader::Entry& entry, uint64_t here) {
  const auto& [r, all] = entry;
  const auto kind = static_cast<Kind>(r.kind);
  RecordView view{r.index, here, r.bytes, kind, r.aux, {}, {}, {}, {}, {}};
  view.frees.assign(all, all + r.frees);
  view.done = here < log.page().server().cursor.load(std::memory_order_relaxed);
  const uint64_t words = (r.bytes - sizeof(Record)) / 8 - r.frees;
  const uint64_t* body = all + r.frees;
  if (is_operator(kind)) view.operation = template_name(log, r.aux);
  if (kind == Kind::kCollective && words >= sizeof(CollectiveHeader) / 8) {
    const auto header = copy_once(*reinterpret_cast<const CollectiveHeader*>(body));
    view.operation = name_of(static_cast<CollectiveKind>(header.kind));
    view.sequence = header.sequence;
  }
  view.words.assign(body, body + std::min<uint64_t>(words, 16));
  return view;
}

void for_each_record(const LogMap& log, std::optional<uint64_t> first, std::optional<uint64_t> count,
                     const std::function<void(RecordView&&)>& see) {
  const ReaderPage page = log.page();
  const uint64_t tail = page.worker().tail.load(std::memory_order_acquire);
  const uint64_t freed = page.server().freed_segments.load(std::memory_order_acquire);
  if (freed > tail / log.segment_bytes()) return;  // all of it was freed meanwhile
  uint64_t offset = freed * log.segment_bytes();
  if (tail - offset > log.segment_count() * log.segment_bytes())
    throw LogError("the log claims to hold more than it has room for");
  LogReader reader(log);
  for (uint64_t seen = 0; offset < tail && (!count || seen < *count);) {
    const auto [r, all] = reader.read(offset, tail);
    const uint64_t here = offset;
    offset += r.bytes;
    const auto kind = static_cast<Kind>(r.kind);
    if (kind == Kind::kPad || (first && r.index < *first)) continue;
    see(view_record(log, {r, all}, here));
    seen++;
  }
}

}  // namespace understudy::replay
