// Engine "dax": persistent memory mapped into the process; non-temporal stores and a fence (PCcheck,
// section 3.3).
#pragma once
#include <memory>
#include <string>

#include "recovery/snapshots/csrc/engines/mmap_storage.h"
#include "recovery/snapshots/csrc/storage/stream_copy.h"

namespace understudy::persistence {

class DaxStorage final : public Storage {
 public:
  // Throws StorageError where the file is not on persistent memory, unless `emulate`: then the same stores go
  // to cached pages, msync makes them durable, and engine() says "dax (emulated)".
  DaxStorage(const std::string& path, bool writable, bool emulate);

  bool real() const { return real_; }
  const std::string& name() const override { return file_.path(); }
  const char* engine() const override { return real_ ? "dax" : "dax (emulated)"; }
  uint64_t bytes() const override { return file_.bytes(); }
  uint32_t alignment() const override { return 1; }
  // A write ends with a fence in its own thread: on persistent memory it is durable when wait() answers.
  std::unique_ptr<Writer> writer() override;  // must not outlive the storage
  void sync() override { sync(0, bytes()); }
  void sync(uint64_t offset, uint64_t bytes) override;
  bool syncs_ranges() const override { return true; }
  // By pread, which sees the same memory: a poisoned line is an exception then, not a SIGBUS.
  void read(uint64_t offset, uint8_t* data, uint64_t bytes) const override {
    file_.read(offset, data, bytes);
  }

 private:
  const StorageFile file_;
  const bool real_;
  const Stream stream_;
  const FileMapping mapping_;
  GroupSync sync_;
};

}  // namespace understudy::persistence
