// Slots in a file, through the page cache.
#pragma once
#include "recovery/persistence/csrc/file_handle.h"
#include "recovery/persistence/csrc/storage.h"

namespace understudy::persistence {

class FileStorage final : public Storage {
 public:
  FileStorage(const std::string& path, bool writable);

  const std::string& name() const override { return path_; }
  const char* engine() const override { return "buffered"; }
  uint64_t bytes() const override { return bytes_; }
  uint32_t alignment() const override { return 1; }
  std::unique_ptr<Writer> writer() override;
  void sync() override;
  void sync(uint64_t offset, uint64_t bytes) override;
  void read(uint64_t offset, uint8_t* data, uint64_t bytes) const override;

 private:
  const std::string path_;
  const FileHandle file_;
  uint64_t bytes_ = 0;
};

}  // namespace understudy::persistence
