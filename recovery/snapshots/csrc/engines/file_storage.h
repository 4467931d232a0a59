// Engines "direct" and "buffered": pwrite, with and without the page cache in between.
#pragma once
#include <memory>
#include <string>

#include "recovery/snapshots/csrc/engines/group_sync.h"
#include "recovery/snapshots/csrc/storage/storage.h"
#include "recovery/snapshots/csrc/storage/storage_file.h"

namespace understudy::persistence {

class FileStorage : public Storage {
 public:
  FileStorage(const std::string& path, bool writable, bool direct);

  const std::string& name() const override { return file_.path(); }
  const char* engine() const override { return direct_ ? "direct" : "buffered"; }
  uint64_t bytes() const override { return file_.bytes(); }
  uint32_t alignment() const override { return file_.alignment(); }
  std::unique_ptr<Writer> writer() override;  // must not outlive the storage
  void sync() override;
  void sync(uint64_t offset, uint64_t bytes) override;
  void read(uint64_t offset, uint8_t* data, uint64_t bytes) const override {
    file_.read(offset, data, bytes);
  }

 protected:
  const StorageFile& file() const { return file_; }

 private:
  const bool direct_;
  const StorageFile file_;
  GroupSync sync_;
};

// fdatasync; 0 or an error number.
int flush_file(int fd);

}  // namespace understudy::persistence
