// An open file that closes itself.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

class FileHandle {
 public:
  // Throws StorageError.
  FileHandle(const std::string& path, int flags, mode_t mode = 0)
      : number_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
    if (number_ < 0) throw StorageError(errno, path + " cannot be opened");
  }
  FileHandle(FileHandle&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileHandle& operator=(FileHandle&&) = delete;
  ~FileHandle() {
    if (number_ >= 0) ::close(number_);
  }

  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace understudy::persistence
