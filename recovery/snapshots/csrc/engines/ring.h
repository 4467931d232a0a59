// The two queues that a thread shares with the kernel (io_uring), by bare system calls: liburing is not asked
// for.
#pragma once
#include <linux/io_uring.h>

#include <cstdint>
#include <optional>

#include "recovery/snapshots/csrc/storage/storage_file.h"

namespace understudy::persistence {

// Unmaps.
class MappedQueue {
 public:
  MappedQueue(int ring, uint64_t offset, uint64_t bytes);
  ~MappedQueue();
  MappedQueue(const MappedQueue&) = delete;
  MappedQueue& operator=(const MappedQueue&) = delete;
  template <class T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(data_) + offset);
  }

 private:
  void* data_;
  uint64_t bytes_;
};

struct Completion {
  uint64_t user;
  int32_t result;  // bytes, or a negative error number
};

// One thread's.  A forked child must not touch it.
class Ring {
 public:
  explicit Ring(uint32_t entries);  // throws StorageError that says why there is none

  // Queues IORING_OP_WRITE or IORING_OP_READ; the kernel sees it with the next enter().  Precondition: fewer
  // than `entries` are queued.
  void queue(uint8_t operation, int fd, uint64_t offset, const uint8_t* data, uint32_t bytes, uint64_t user);
  // Hands what is queued to the kernel and, if asked to, waits for a completion.  0, or an error number:
  // EINTR, EAGAIN and EBUSY ask for another try.
  int enter(bool wait);
  std::optional<Completion> take();

  uint32_t queued() const { return queued_; }  // not handed over yet

 private:
  explicit Ring(io_uring_params params, uint32_t entries);

  io_uring_params params_;
  Descriptor fd_;
  MappedQueue queues_;
  MappedQueue entries_;
  uint32_t queued_ = 0;
};

}  // namespace understudy::persistence
