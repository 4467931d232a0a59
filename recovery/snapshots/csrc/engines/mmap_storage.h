// Engine "mmap": copies into a mapped file, msync (what PCcheck does for SSDs, section 3.3).
#pragma once
#include <memory>
#include <string>

#include "recovery/snapshots/csrc/engines/group_sync.h"
#include "recovery/snapshots/csrc/storage/storage.h"
#include "recovery/snapshots/csrc/storage/storage_file.h"

namespace understudy::persistence {

// A whole file in memory.
class FileMapping {
 public:
  // `flags` beside MAP_SHARED.  Throws StorageError.
  FileMapping(const StorageFile& file, int flags);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  uint8_t* data() const { return data_; }
  // Gets the pages of a range ready to be written.  False where a store would end the process with SIGBUS (no
  // space behind a hole, a page that cannot be read): write() them instead, which says what is wrong.
  bool prepare(uint64_t offset, uint64_t bytes) const;
  // msync of the pages around [begin, end); 0 or an error number.
  int flush(uint64_t begin, uint64_t end) const;

 private:
  uint8_t* data_;
  const uint64_t bytes_;
};

class MmapStorage final : public Storage {
 public:
  MmapStorage(const std::string& path, bool writable);

  const std::string& name() const override { return file_.path(); }
  const char* engine() const override { return "mmap"; }
  uint64_t bytes() const override { return file_.bytes(); }
  uint32_t alignment() const override { return 1; }
  std::unique_ptr<Writer> writer() override;  // must not outlive the storage
  void sync() override { sync(0, bytes()); }
  void sync(uint64_t offset, uint64_t bytes) override;
  bool syncs_ranges() const override { return true; }
  // By pread, which sees the same pages: an unreadable block is an exception then, not a SIGBUS.
  void read(uint64_t offset, uint8_t* data, uint64_t bytes) const override {
    file_.read(offset, data, bytes);
  }

 private:
  const StorageFile file_;
  const FileMapping mapping_;
  GroupSync sync_;
};

}  // namespace understudy::persistence
