// A disk in memory that notes what is written and synced, and fails where a test wants it to.  For tests
// only.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

// What happened, in order.  A write may reach the disk from kWrite on, and belongs to what a sync makes
// durable once it is kDone before that sync's kSync.
enum class Happened : uint8_t { kWrite, kDone, kSync, kSynced, kSyncFailed, kMark };

struct DiskEvent {
  Happened what;
  uint64_t number;      // of the write or the sync, or the mark
  uint64_t offset = 0;  // of a write or a sync
  uint64_t bytes = 0;
  std::vector<uint8_t> data{};  // of a write
};

class RecordedDisk {
 public:
  // `ranges`: a sync of a range makes no more than that durable, as of a mapped file.
  RecordedDisk(std::vector<uint8_t> content, bool ranges) : ranges_(ranges), content_(std::move(content)) {}

  // Operation `number` (counted from 0: a writer made, a submit, a wait, a sync or a read) fails, and all
  // that follow if `forever`.
  void fail(uint64_t number, int error, bool forever);
  uint64_t operations() const;
  // Syncs of ranges within [begin, end) return without having done anything, too: a wrong order of commits.
  void ignore_syncs(uint64_t begin, uint64_t end);
  void mark(uint64_t number);
  void keep_log(bool on);
  std::vector<DiskEvent> log() const;
  std::vector<uint8_t> content() const;

 private:
  friend class RecordedStorage;
  friend class RecordedWriter;
  void operation();  // counts it, and throws if it is to fail; precondition: mutex_

  const bool ranges_;
  mutable std::mutex mutex_;
  std::vector<uint8_t> content_;
  std::vector<DiskEvent> log_;
  bool logging_ = true;
  uint64_t operations_ = 0;
  uint64_t next_number_ = 0;
  uint64_t fail_at_ = UINT64_MAX;
  int error_ = 0;
  bool forever_ = false;
  std::vector<std::pair<uint64_t, uint64_t>> ignored_;  // begin, end
  uint64_t random_ = 1;
};

class RecordedStorage final : public Storage {
 public:
  RecordedStorage(std::shared_ptr<RecordedDisk> disk, uint32_t depth);

  const std::string& name() const override { return name_; }
  const char* engine() const override { return "recorded"; }
  uint64_t bytes() const override { return bytes_; }
  uint32_t alignment() const override { return 4096; }
  std::unique_ptr<Writer> writer() override;
  void sync() override { sync(0, bytes_); }
  void sync(uint64_t offset, uint64_t bytes) override;
  bool syncs_ranges() const override { return disk_->ranges_; }
  void read(uint64_t offset, uint8_t* data, uint64_t bytes) const override;

 private:
  const std::shared_ptr<RecordedDisk> disk_;
  const uint32_t depth_;
  const std::string name_ = "the recorded disk";
  uint64_t bytes_;
};

}  // namespace understudy::persistence
