#include "recovery/snapshots/csrc/engines/group_sync.h"

#include <algorithm>
#include <utility>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

GroupSync::GroupSync(std::string name, Flush flush) : name_(std::move(name)), flush_(std::move(flush)) {}

void GroupSync::sync(uint64_t begin, uint64_t end) {
  std::unique_lock lock(mutex_);
  const bool was_failed = failed_ != 0;
  begin_ = std::min(begin_, begin);
  end_ = std::max(end_, end);
  const uint64_t mine = next_;
  while (failed_ == 0 && done_ < mine) {
    if (flushing_) {
      waiting_++;
      ended_.wait(lock);
      waiting_--;
      continue;
    }
    flushing_ = true;
    const uint64_t number = next_++;
    const uint64_t first = std::exchange(begin_, UINT64_MAX), last = std::exchange(end_, 0);
    lock.unlock();
    const int error = flush_(first, last);
    lock.lock();
    flushing_ = false;
    if (error != 0)
      failed_ = error;
    else
      done_ = number;
    ended_.notify_all();
  }
  if (was_failed)
    throw StorageError(failed_,
                       name_ + " lost data in an earlier sync and must be opened anew before it is used");
  if (failed_ != 0) throw StorageError(failed_, "cannot make durable what was written to " + name_);
}

uint32_t GroupSync::waiting() {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

}  // namespace understudy::persistence
