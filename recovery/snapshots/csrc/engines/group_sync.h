// One flush for all threads that wait for one, and no flush after one that failed.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace understudy::persistence {

// The kernel tells about a failed write-back once per open file, to whichever flush comes first, and then
// takes the pages for clean: a second fdatasync or msync answers success for data that is lost ("fsyncgate").
// Hence
//  - a failure stays: every later sync throws, until the storage is opened anew;
//  - flushes never overlap: of two at a time only one would learn of the failure.
// Threads that come while a flush runs share the next one, which covers all their ranges.
class GroupSync {
 public:
  // Makes [begin, end) durable; 0 or an error number.  Must not throw.
  using Flush = std::function<int(uint64_t begin, uint64_t end)>;

  GroupSync(std::string name, Flush flush);
  // Any thread.  Throws StorageError, also for a flush of the past that failed.
  void sync(uint64_t begin, uint64_t end);
  // How many threads wait for a flush to end that is not theirs.
  uint32_t waiting();

 private:
  const std::string name_;
  const Flush flush_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool flushing_ = false;
  uint32_t waiting_ = 0;
  int failed_ = 0;
  uint64_t next_ = 1;                      // number of the flush that has not begun
  uint64_t done_ = 0;                      // number of the last flush that ended well
  uint64_t begin_ = UINT64_MAX, end_ = 0;  // what the next flush is to cover
};

}  // namespace understudy::persistence
