// What the tools show of a log: its commits and its records. The log may be a hostile worker's.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "replay/csrc/log/log_map.h"
#include "replay/csrc/log/log_reader.h"
#include "replay/csrc/rewind/manifest.h"
#include "replay/csrc/rewind/marks.h"

namespace understudy::replay {

struct CommitView {
  uint64_t number, log_offset, record_index, step, call;
  bool complete, has_manifest;
  bool optimizer;  // an optimizer step without pre-images begins right behind it
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> communicators;  // uid low, uid high, sequence
  std::vector<uint64_t> members;                                        // of each of them
  uint64_t step_digest;  // of the optimizer step before it; 0: not known
};

struct SnapshotView {
  uint64_t serial, bytes;
  double seconds;  // that copying it took
  CommitView commit;
};

CommitView describe(const CommitRow& row);

// Commits still in the ring, oldest first.
std::vector<CommitView> commits(const LogMap& log);
std::vector<CommitRow> commit_rows(const LogMap& log);

// Published snapshots, oldest first.
std::vector<SnapshotView> snapshots(const LogMap& log);

// What a published snapshot consists of, and where in the file `snapshot` it lies.
struct SnapshotContents {
  CommitRow commit;
  Manifest manifest;
};
// Throws LogError if it is not published, or damaged.
SnapshotContents snapshot_contents(const LogMap& log, uint64_t serial);
// Whether it is still published: what was read of it before this is its content.
bool snapshot_holds(const LogMap& log, uint64_t serial);

// The row of one commit; throws LogError if it is not in the ring.
CommitRow commit_row(const LogMap& log, uint64_t number);
CommitEntry commit_entry(const LogMap& log, uint64_t number);

struct RecordView {
  uint64_t index, offset, bytes;
  Kind kind;
  uint64_t aux;
  std::vector<uint64_t> frees;
  bool done;
  std::optional<std::string> operation;  // of operators and collectives
  std::optional<uint64_t> sequence;      // of collectives
  std::vector<uint64_t> words;           // the first of the body
};

// `entry` of the log's offset `here`; nothing of it is taken on trust.
RecordView view_record(const LogMap& log, const LogReader::Entry& entry, uint64_t here);

// The operator of a template, "?" if there is no such template.
std::string template_name(const LogMap& log, uint64_t id);

// Records still in the log, [first, first + count) by index; throws LogError at the first that cannot be
// read.
void for_each_record(const LogMap& log, std::optional<uint64_t> first, std::optional<uint64_t> count,
                     const std::function<void(RecordView&&)>& see);

}  // namespace understudy::replay
