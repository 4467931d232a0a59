#include "recovery/snapshots/csrc/testing/recorded_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace understudy::persistence {
namespace {

void check_aligned(uint64_t offset, const void* data, uint64_t bytes, uint64_t end) {
  if (offset % 4096 != 0 || bytes % 4096 != 0 || bytes == 0 || reinterpret_cast<uintptr_t>(data) % 4096 != 0)
    throw std::logic_error("an access that direct I/O would refuse");
  if (offset > end || bytes > end - offset) throw StorageError(EIO, "the recorded disk ends before that");
}

}  // namespace

// Writes are done in any order, and late: not when they are submitted, but when somebody waits.
class RecordedWriter final : public Writer {
 public:
  RecordedWriter(std::shared_ptr<RecordedDisk> disk, uint32_t depth)
      : disk_(std::move(disk)), depth_(depth) {}
  RecordedWriter(const RecordedWriter&) = delete;
  RecordedWriter& operator=(const RecordedWriter&) = delete;

  ~RecordedWriter() override {
    const std::lock_guard lock(disk_->mutex_);
    for (const UnderWay& write : under_way_) apply(write, write.data.size());
  }

  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) override {
    const std::lock_guard lock(disk_->mutex_);
    check_aligned(offset, data, bytes, disk_->content_.size());
    if (under_way_.size() >= depth_) throw std::logic_error("more writes under way than depth() allows");
    disk_->operation();
    UnderWay write{disk_->next_number_++, offset, token, data, {data, data + bytes}};
    if (disk_->logging_) disk_->log_.push_back({Happened::kWrite, write.number, offset, bytes, write.data});
    under_way_.push_back(std::move(write));
  }

  uint32_t depth() const override { return depth_; }

  uint64_t wait() override {
    const std::lock_guard lock(disk_->mutex_);
    if (under_way_.empty()) throw std::logic_error("nothing to wait for");
    disk_->random_ = disk_->random_ * 6364136223846793005ull + 1442695040888963407ull;
    const size_t which = (disk_->random_ >> 33) % under_way_.size();
    const UnderWay write = std::move(under_way_[which]);
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(which));
    if (std::memcmp(write.memory, write.data.data(), write.data.size()) != 0)
      throw std::logic_error("memory changed while it was being written");
    try {
      disk_->operation();
    } catch (...) {
      apply(write, write.data.size() / 2);
      throw;
    }
    apply(write, write.data.size());
    if (disk_->logging_) disk_->log_.push_back({Happened::kDone, write.number});
    return write.token;
  }

 private:
  struct UnderWay {
    uint64_t number, offset, token;
    const uint8_t* memory;
    std::vector<uint8_t> data;
  };

  void apply(const UnderWay& write, size_t bytes) {
    std::memcpy(disk_->content_.data() + write.offset, write.data.data(), bytes);
  }

  const std::shared_ptr<RecordedDisk> disk_;
  const uint32_t depth_;
  std::vector<UnderWay> under_way_;
};

void RecordedDisk::operation() {
  const uint64_t number = operations_++;
  if (number == fail_at_ || (forever_ && number > fail_at_))
    throw StorageError(error_, "the recorded disk fails");
}

void RecordedDisk::fail(uint64_t number, int error, bool forever) {
  const std::lock_guard lock(mutex_);
  fail_at_ = number;
  error_ = error;
  forever_ = forever;
}

uint64_t RecordedDisk::operations() const {
  const std::lock_guard lock(mutex_);
  return operations_;
}

void RecordedDisk::ignore_syncs(uint64_t begin, uint64_t end) {
  const std::lock_guard lock(mutex_);
  ignored_.emplace_back(begin, end);
}

void RecordedDisk::mark(uint64_t number) {
  const std::lock_guard lock(mutex_);
  log_.push_back({Happened::kMark, number});
}

void RecordedDisk::keep_log(bool on) {
  const std::lock_guard lock(mutex_);
  logging_ = on;
}

std::vector<DiskEvent> RecordedDisk::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

std::vector<uint8_t> RecordedDisk::content() const {
  const std::lock_guard lock(mutex_);
  return content_;
}

RecordedStorage::RecordedStorage(std::shared_ptr<RecordedDisk> disk, uint32_t depth)
    : disk_(std::move(disk)), depth_(depth), bytes_(disk_->content().size()) {}

std::unique_ptr<Writer> RecordedStorage::writer() {
  const std::lock_guard lock(disk_->mutex_);
  disk_->operation();
  return std::make_unique<RecordedWriter>(disk_, depth_);
}

void RecordedStorage::sync(uint64_t offset, uint64_t bytes) {
  uint64_t number = 0;
  {
    const std::lock_guard lock(disk_->mutex_);
    for (const auto& [begin, end] : disk_->ignored_)
      if (offset >= begin && offset + bytes <= end) return;
    number = disk_->next_number_++;
    if (disk_->logging_) disk_->log_.push_back({Happened::kSync, number, offset, bytes});
  }
  const std::lock_guard lock(disk_->mutex_);  // others may write between begin and end
  try {
    disk_->operation();
  } catch (...) {
    if (disk_->logging_) disk_->log_.push_back({Happened::kSyncFailed, number, offset, bytes});
    throw;
  }
  if (disk_->logging_) disk_->log_.push_back({Happened::kSynced, number, offset, bytes});
}

void RecordedStorage::read(uint64_t offset, uint8_t* data, uint64_t bytes) const {
  const std::lock_guard lock(disk_->mutex_);
  check_aligned(offset, data, bytes, disk_->content_.size());
  disk_->operation();
  std::memcpy(data, disk_->content_.data() + offset, bytes);
}

}  // namespace understudy::persistence
