// Contents on their way from a GPU into host memory, many behind one wait.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace understudy::server {

// The whole content goes to `to`, which has room for it and need not be pinned.
struct HostCopy {
  const c10::Storage* from;
  void* to;
};

class HostCopies {
 public:
  // Queues copies on the current device's stream until its memory is full; returns how many. Throws
  // c10::Error.
  size_t queue(const HostCopy* copies, size_t count);
  // Once the device has passed them.
  void finish();

 private:
  static constexpr uint64_t kMost = 64 << 20;  // bytes of pinned memory
  struct Queued {
    const void* staged;
    void* to;
    uint64_t bytes;
  };

  c10::DataPtr memory_;
  uint64_t room_ = 0;
  std::vector<Queued> queued_;
};

}  // namespace understudy::server
