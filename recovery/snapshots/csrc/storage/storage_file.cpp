#include "recovery/snapshots/csrc/storage/storage_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <memory>

namespace understudy::persistence {
namespace {

constexpr uint32_t kLargestAlignment = 4096;  // what storage.h promises

// Asked before the opening, so that a pipe or a terminal is never opened at all.
bool is_device(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) throw StorageError(errno, "cannot inspect " + path);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
    throw StorageError(EINVAL, path + " is neither a file nor a block device");
  return S_ISBLK(status.st_mode);
}

int open_file(const std::string& path, bool writable, bool direct, bool device) {
  int flags = O_CLOEXEC | (writable ? O_RDWR : O_RDONLY);
  if (direct) flags |= O_DIRECT;
  if (writable && device) flags |= O_EXCL;  // refused while a file system is mounted from it
  const int fd = open(path.c_str(), flags);
  if (fd >= 0) return fd;
  if (direct && errno == EINVAL) throw StorageError(EINVAL, path + " is on a file system without direct I/O");
  throw StorageError(errno, "cannot open " + path + (writable ? " for writing" : ""));
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

StorageFile::StorageFile(const std::string& path, bool writable, bool direct)
    : path_(path),
      writable_(writable),
      device_(is_device(path)),
      fd_(open_file(path, writable, direct, device_)),
      bytes_(measure()),
      alignment_(direct ? direct_alignment() : 1) {
  if (bytes_ == 0) throw StorageError(EINVAL, path + " has no room: its size is 0 bytes");
  if (direct) try_direct_read();
}

uint64_t StorageFile::measure() const {
  if (device_) {
    uint64_t bytes = 0;
    if (ioctl(fd(), BLKGETSIZE64, &bytes) != 0) throw StorageError(errno, "cannot measure " + path_);
    return bytes;
  }
  struct stat status{};
  if (fstat(fd(), &status) != 0) throw StorageError(errno, "cannot measure " + path_);
  return static_cast<uint64_t>(status.st_size);
}

uint32_t StorageFile::direct_alignment() const {
  uint32_t alignment = device_ ? 512 : kLargestAlignment;
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (statx(fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
    if (status.stx_dio_offset_align == 0)
      throw StorageError(EINVAL, path_ + " cannot be read past the page cache");
    alignment = std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
  }
#endif
  if (device_) {
    int sector = 0;
    if (ioctl(fd(), BLKSSZGET, &sector) != 0)
      throw StorageError(errno, "cannot learn the block size of " + path_);
    alignment = std::max(alignment, static_cast<uint32_t>(sector));
  }
  if (alignment > kLargestAlignment || !std::has_single_bit(alignment))
    throw StorageError(EINVAL, path_ + " wants direct I/O in blocks of " + std::to_string(alignment) +
                                   " bytes, which we cannot do");
  return alignment;
}

// Some file systems take O_DIRECT at the opening and refuse the first transfer.
void StorageFile::try_direct_read() const {
  const std::unique_ptr<void, decltype(&std::free)> block(
      std::aligned_alloc(kLargestAlignment, kLargestAlignment), &std::free);
  if (block == nullptr) throw StorageError(ENOMEM, "no memory to try direct I/O on " + path_);
  if (pread(fd(), block.get(), alignment_, 0) < 0 && errno == EINVAL)
    throw StorageError(EINVAL,
                       path_ + " refuses direct I/O in blocks of " + std::to_string(alignment_) + " bytes");
}

void StorageFile::fail(int number, const char* verb, uint64_t offset, uint64_t bytes) const {
  throw StorageError(number, std::string("cannot ") + verb + " " + std::to_string(bytes) + " bytes at " +
                                 std::to_string(offset) + " of " + path_);
}

void StorageFile::check(const char* verb, uint64_t offset, const uint8_t* data, uint64_t bytes) const {
  if (bytes > bytes_ || offset > bytes_ - bytes)
    throw StorageError(EINVAL, std::string("asked to ") + verb + " " + std::to_string(bytes) + " bytes at " +
                                   std::to_string(offset) + " of " + path_ + ", which ends at " +
                                   std::to_string(bytes_));
  if (((offset | bytes | reinterpret_cast<uintptr_t>(data)) & (alignment_ - 1)) != 0)
    throw StorageError(EINVAL, std::string("asked to ") + verb + " " + std::to_string(bytes) + " bytes at " +
                                   std::to_string(offset) + " of " + path_ +
                                   ": offset, length and memory must be multiples of " +
                                   std::to_string(alignment_));
}

void StorageFile::check_writable() const {
  if (!writable_) throw StorageError(EROFS, path_ + " was opened to be read only");
}

void StorageFile::write(uint64_t offset, const uint8_t* data, uint64_t bytes) const {
  while (bytes > 0) {
    const ssize_t n = pwrite(fd(), data, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(errno, "write", offset, bytes);
    const uint64_t moved = whole_blocks(static_cast<uint64_t>(n));
    if (moved == 0) fail(EIO, "write", offset, bytes);  // no progress: it would never end
    offset += moved, data += moved, bytes -= moved;
  }
}

void StorageFile::read(uint64_t offset, uint8_t* data, uint64_t bytes) const {
  check("read", offset, data, bytes);
  while (bytes > 0) {
    const ssize_t n = pread(fd(), data, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(errno, "read", offset, bytes);
    const uint64_t moved = whole_blocks(static_cast<uint64_t>(n));
    if (moved == 0) fail(EIO, "read", offset, bytes);  // somebody has cut the file short
    offset += moved, data += moved, bytes -= moved;
  }
}

}  // namespace understudy::persistence
