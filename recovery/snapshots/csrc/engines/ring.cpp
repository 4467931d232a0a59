#include "recovery/snapshots/csrc/engines/ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace understudy::persistence {
namespace {

int set_up(uint32_t entries, io_uring_params& params) {
  const auto fd = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
  if (fd >= 0) return fd;
  switch (errno) {
    case ENOSYS:
      throw StorageError(ENOSYS, "this kernel has no io_uring, or a container hides it");
    case EPERM:
    case EACCES:
      throw StorageError(
          errno, "io_uring is forbidden to this process (kernel.io_uring_disabled, or a seccomp filter)");
    case ENOMEM:
      throw StorageError(ENOMEM, "no memory may be locked for io_uring (ulimit -l)");
    default:
      throw StorageError(errno, "io_uring cannot be set up");
  }
}

uint64_t bytes_of_queues(const io_uring_params& p) {
  return std::max(p.sq_off.array + p.sq_entries * sizeof(uint32_t),
                  p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe));
}

}  // namespace

MappedQueue::MappedQueue(int ring, uint64_t offset, uint64_t bytes)
    : data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                 static_cast<off_t>(offset))),
      bytes_(bytes) {
  if (data_ == MAP_FAILED) throw StorageError(errno, "the queues of io_uring cannot be mapped");
}

MappedQueue::~MappedQueue() { munmap(data_, bytes_); }

Ring::Ring(uint32_t entries) : Ring(io_uring_params{}, entries) {}

Ring::Ring(io_uring_params params, uint32_t entries)
    : params_(params),
      fd_(set_up(entries, params_)),
      queues_(fd_.get(), IORING_OFF_SQ_RING, bytes_of_queues(params_)),
      entries_(fd_.get(), IORING_OFF_SQES, params_.sq_entries * sizeof(io_uring_sqe)) {
  // The one came with Linux 5.4, the other with 5.6 together with the plain write we use.
  constexpr uint32_t kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
  if ((params_.features & kNeeded) != kNeeded)
    throw StorageError(ENOSYS, "this kernel's io_uring is older than Linux 5.6");
  for (uint32_t i = 0; i < params_.sq_entries; i++) queues_.at<uint32_t>(params_.sq_off.array)[i] = i;
}

void Ring::queue(uint8_t operation, int fd, uint64_t offset, const uint8_t* data, uint32_t bytes,
                 uint64_t user) {
  uint32_t& tail = *queues_.at<uint32_t>(params_.sq_off.tail);
  io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[tail & (params_.sq_entries - 1)];
  std::memset(&entry, 0, sizeof entry);
  entry.opcode = operation;
  // Not a registered file: a ring that was closed gives those back late, and the file system could not be
  // unmounted meanwhile.  For writes of a megabyte the lookup that it saves is nothing.
  entry.fd = fd;
  entry.off = offset;
  entry.addr = reinterpret_cast<uintptr_t>(data);
  entry.len = bytes;
  entry.user_data = user;
  std::atomic_ref(tail).store(tail + 1, std::memory_order_release);
  queued_++;
}

int Ring::enter(bool wait) {
  const uint32_t flags = wait ? IORING_ENTER_GETEVENTS : 0;
  const auto taken = static_cast<int>(
      syscall(SYS_io_uring_enter, fd_.get(), queued_, wait ? 1 : 0, flags, nullptr, size_t{0}));
  if (taken < 0) return errno;
  queued_ -= static_cast<uint32_t>(taken);
  return 0;
}

std::optional<Completion> Ring::take() {
  uint32_t& head = *queues_.at<uint32_t>(params_.cq_off.head);
  uint32_t& tail = *queues_.at<uint32_t>(params_.cq_off.tail);
  if (head == std::atomic_ref(tail).load(std::memory_order_acquire)) return std::nullopt;
  const io_uring_cqe& entry = queues_.at<io_uring_cqe>(params_.cq_off.cqes)[head & (params_.cq_entries - 1)];
  const Completion found{entry.user_data, entry.res};
  std::atomic_ref(head).store(head + 1, std::memory_order_release);
  return found;
}

}  // namespace understudy::persistence
