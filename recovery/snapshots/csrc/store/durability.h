// Makes sure that "durable" is true even when another thread's sync fails.
//
// Linux reports a page that could not be written back once, to one sync, and then takes it for clean: a sync
// that comes later succeeds although the page is lost.  So syncs take turns, and one that failed counts
// against everybody who had begun to write before.
#pragma once
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

class Durability {
 public:
  explicit Durability(Storage& storage) : storage_(storage) {}

  // To be asked before the first write that a later sync is to make durable.
  uint64_t begin() const { return failures_.load(std::memory_order_acquire); }

  // What has been written since `begun` (an answer of begin()) in the range is durable when this returns.
  void sync(uint64_t begun, uint64_t offset, uint64_t bytes) {
    const std::lock_guard turn(turn_);
    if (failures_.load(std::memory_order_relaxed) != begun)
      throw StorageError(EIO,
                         storage_.name() + ": another sync failed, which may have lost this one's writes");
    try {
      storage_.sync(offset, bytes);
    } catch (...) {
      failures_.fetch_add(1, std::memory_order_release);
      throw;
    }
  }

 private:
  Storage& storage_;
  std::mutex turn_;
  std::atomic<uint64_t> failures_{0};
};

}  // namespace understudy::persistence
