// The log's segments as memory that a GPU copies from by itself.
#pragma once
#include <c10/core/Device.h>

#include <unordered_set>

namespace understudy::server {

// Registers a segment with the driver the first time that a payload in it goes to the device (a log is large
// and mostly untouched). Unregisters all of them when it is destroyed. Nothing to do on the `cpu` driver.
class PinnedLog {
 public:
  PinnedLog(c10::Device device, uint64_t segment_bytes) : device_(device), segment_bytes_(segment_bytes) {}
  ~PinnedLog();
  PinnedLog(const PinnedLog&) = delete;
  PinnedLog& operator=(const PinnedLog&) = delete;

  // `segment` is where one begins. If the driver refuses, copies from it are merely not asynchronous.
  void pin(void* segment);

 private:
  c10::Device device_;
  uint64_t segment_bytes_;
  bool refused_ = false;
  std::unordered_set<void*> pinned_;
};

}  // namespace understudy::server
