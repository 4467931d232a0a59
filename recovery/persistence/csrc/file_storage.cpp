#include "recovery/persistence/csrc/file_storage.h"

namespace understudy::persistence {
namespace {

// A write has ended when submit() returns.
class FileWriter final : public Writer {
 public:
  FileWriter(const std::string& name, int file) : name_(name), file_(file) {}

  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) override {
    while (bytes != 0) {
      const ssize_t written = ::pwrite(file_, data, bytes, static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) throw StorageError(written == 0 ? ENOSPC : errno, name_ + " cannot be written");
      offset += static_cast<uint64_t>(written);
      data += written;
      bytes -= static_cast<uint64_t>(written);
    }
    token_ = token;
  }
  uint32_t depth() const override { return 1; }
  uint64_t wait() override { return token_; }

 private:
  const std::string& name_;
  const int file_;
  uint64_t token_ = 0;
};

}  // namespace

FileStorage::FileStorage(const std::string& path, bool writable)
    : path_(path), file_(path, writable ? O_RDWR : O_RDONLY) {
  const off_t end = ::lseek(file_.number(), 0, SEEK_END);  // of a partition, too
  if (end < 0) throw StorageError(errno, path + " has no size");
  bytes_ = static_cast<uint64_t>(end);
}

std::unique_ptr<Writer> FileStorage::writer() { return std::make_unique<FileWriter>(path_, file_.number()); }

void FileStorage::sync() {
  if (::fdatasync(file_.number()) != 0) throw StorageError(errno, path_ + " cannot be made durable");
}

void FileStorage::sync(uint64_t, uint64_t) { sync(); }

void FileStorage::read(uint64_t offset, uint8_t* data, uint64_t bytes) const {
  while (bytes != 0) {
    const ssize_t got = ::pread(file_.number(), data, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw StorageError(got == 0 ? EIO : errno, path_ + " cannot be read");
    offset += static_cast<uint64_t>(got);
    data += got;
    bytes -= static_cast<uint64_t>(got);
  }
}

}  // namespace understudy::persistence
