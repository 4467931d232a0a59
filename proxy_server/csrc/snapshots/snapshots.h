// Snapshots: the whole state at a commit, in host memory owned by proxyd. With the log since then a rank can
// be rebuilt by itself, whatever became of the others.
//
// They are copy-on-write: at the commit only a list of buffers is made, and a place found for each. Contents
// are copied afterwards by a thread of its own (Copier), beside the records that run; the writes are known,
// so a buffer that is about to change and was not copied yet is copied then (Capture). Nothing else waits.
// On a GPU that is on a stream of its own. Without the thread the executor copies in portions, while it waits
// for records and between them.
//
// A snapshot is published by the executor when it is whole: one that its server did not live to finish is
// never seen by anybody. Everything here is called by one thread at a time; only a CopyList has several.
#pragma once
#include <array>
#include <optional>
#include <vector>

#include "proxy_server/csrc/collectives/collectives.h"
#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/snapshots/copier.h"
#include "proxy_server/csrc/snapshots/copy_list.h"
#include "proxy_server/csrc/snapshots/shadow_area.h"
#include "replay/csrc/log/log_map.h"
#include "replay/csrc/rewind/marks.h"
#include "replay/csrc/rewind/rewind.h"

namespace understudy::server {

class Snapshots final : public replay::Capture {
 public:
  Snapshots(const Driver& driver, replay::LogMap& log, BufferTable& table);

  // Serial of the snapshot that proxyd wants of the commit that has just been made, with so many optimizer
  // steps done; 0: none.
  uint64_t ordered(uint64_t steps) const;
  // Takes one of the commit that has just been made; `rest`: all of its manifest but the buffers.
  void begin(uint64_t serial, replay::CommitRow commit, replay::Manifest rest,
             const std::vector<std::pair<uint64_t, at::Tensor>>& generators);
  bool enabled() const { return area_.area().bytes != 0 && !suspended_; }
  bool under_way() const { return making_.has_value(); }
  // Whether proxyd wants one that has not been begun.
  bool awaited() const;
  // Whether there is one of a commit, or will be. One from before the state went back may bear its number,
  // and be of another place in the log: replay may commit elsewhere.
  bool of(const replay::CommitEntry& commit) const {
    return (making_ && same(making_->commit, commit)) || holds(commit);
  }
  // Publishes it if it is whole. Without the thread: copies up to about `bytes`, and says whether there is
  // more.
  bool advance(uint64_t bytes);
  void finish();  // at once
  void before_change(uint64_t handle, uint32_t captured) override;
  // Of one that nobody ordered.
  uint64_t next_serial() const { return begun() + 1; }
  // The state goes back: what has not been copied cannot be had any more.
  void abandon();

  // The newest published snapshot of that number, which a server may be brought to; throws LogError.
  replay::CommitRow entry(uint64_t commit) const;
  // That of a commit; throws LogError.
  replay::CommitRow entry(const replay::CommitEntry& commit) const;
  replay::Manifest manifest(const replay::CommitEntry& entry) const;
  bool holds(const replay::CommitEntry& commit) const;
  const uint8_t* at(uint64_t offset) const { return area_.at(offset); }

  // Lets go of snapshots that are not needed any more; everything if proxyd has suspended them.
  void apply_floor();
  // Log offset from which records must stay for the sake of a snapshot.
  uint64_t keeps_log_from() const;
  // The log before `offset` goes: from snapshots of then no way leads to the present any more.
  void cut(uint64_t offset);
  // Snapshots on storage need not have the log before `offset` any more; those published keep theirs.
  void let_log_go(uint64_t offset) { unkept_ = offset; }

 private:
  static bool same(const replay::CommitEntry& one, const replay::CommitEntry& other) {
    return one.number == other.number && one.record_index == other.record_index;
  }
  struct Row {
    uint64_t handle, version;
  };
  struct Making {
    uint64_t serial;
    replay::CommitRow commit;
    replay::Manifest manifest;
    std::vector<Row> rows;  // of manifest.buffers, in their order
    std::shared_ptr<CopyList> list;
    bool threaded = false;
    uint64_t nanoseconds = 0, thread_began_ns = 0;
  };

  void adopt();
  // Finds a place for each buffer; false if there is no room.
  bool list_buffers(Making& making);
  CopyList::Copy copy_to_host(const std::vector<Row>& rows) const;
  uint64_t piece_bytes() const;
  std::function<void()> huge_pages() const;
  void check_unchanged(const Row& row, const BufferTable::Buffer& buffer) const;
  void publish();
  void remember_copies();
  void fail();
  // Serial of the newest order that was taken up.
  uint64_t begun() const { return page().server().snapshot_begun.load(std::memory_order_relaxed); }
  void forget_unfinished();
  template <class Wanted>
  replay::CommitRow newest_of(uint64_t number, const Wanted& wanted) const;
  uint64_t row_of(const replay::SnapshotEntry* slot) const;  // in `marks`
  uint64_t newest() const;                                   // serial of those published; 0 = there is none
  // Nothing is published: gives the memory back.
  void forget_contents();
  void forget_lost_copies();
  // The oldest snapshot that may still be asked for. A rank alone needs only its own newest.
  uint64_t floor() const;
  using Leases = std::array<uint64_t, replay::kSnapshotLeases>;
  Leases leases() const;
  // Unpublishes all that are neither leased nor at the floor, or `newer` ones.
  void unpublish(uint64_t floor, const Leases& leased, bool newer);
  replay::ServerPage page() const { return log_.server_page(); }

  const Driver& driver_;
  replay::LogMap& log_;
  BufferTable& table_;
  ShadowArea area_;
  std::optional<Making> making_;
  Copier copier_;
  uint64_t released_ = 0, unkept_ = 0;
  Leases leased_{};
  bool suspended_ = false, failed_before_ = false;
  bool beginning_ = true;  // the log is kept since its beginning, as long as there is no snapshot
};

}  // namespace understudy::server
