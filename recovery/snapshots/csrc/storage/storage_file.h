// An open file or block device, and the checks that every engine makes before it touches one.
#pragma once
#include <cstdint>
#include <string>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

// Closes a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class StorageFile {
 public:
  // `direct`: past the page cache (O_DIRECT).  Throws StorageError; EINVAL where direct I/O is not to be had.
  // A block device that is to be written must be nobody else's (EBUSY where it is mounted).
  StorageFile(const std::string& path, bool writable, bool direct);

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }
  bool writable() const { return writable_; }
  uint32_t alignment() const { return alignment_; }  // 1 unless direct

  // Throws unless [offset, offset + bytes) lies within and all three are aligned.
  void check(const char* verb, uint64_t offset, const uint8_t* data, uint64_t bytes) const;
  void check_writable() const;
  // Whole or an exception; short transfers are continued.
  void write(uint64_t offset, const uint8_t* data, uint64_t bytes) const;
  void read(uint64_t offset, uint8_t* data, uint64_t bytes) const;
  // What a transfer that stopped after `moved` bytes has really done: direct I/O goes on at a whole block.
  uint64_t whole_blocks(uint64_t moved) const { return moved / alignment_ * alignment_; }

  [[noreturn]] void fail(int number, const char* verb, uint64_t offset, uint64_t bytes) const;

 private:
  uint64_t measure() const;
  uint32_t direct_alignment() const;
  void try_direct_read() const;

  const std::string path_;
  const bool writable_;
  const bool device_;
  const Descriptor fd_;
  const uint64_t bytes_;
  const uint32_t alignment_;
};

}  // namespace understudy::persistence
