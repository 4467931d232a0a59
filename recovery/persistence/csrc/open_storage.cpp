#include <filesystem>

#include "recovery/persistence/csrc/file_storage.h"

namespace understudy::persistence {

void create_file(const std::string& path, uint64_t bytes) {
  const FileHandle file(path, O_CREAT | O_EXCL | O_RDWR, 0600);
  try {
    if (const int error = ::posix_fallocate(file.number(), 0, static_cast<off_t>(bytes)); error != 0)
      throw StorageError(error, path + " cannot have " + std::to_string(bytes) + " bytes");
    if (::fsync(file.number()) != 0) throw StorageError(errno, path + " cannot be made durable");
    const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
    const FileHandle directory(folder, O_RDONLY | O_DIRECTORY);
    if (::fsync(directory.number()) != 0)
      throw StorageError(errno, folder.string() + " cannot be made durable");
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

std::unique_ptr<Storage> open_storage(const std::string& path, Engine engine, bool writable, std::string*) {
  if (engine != Engine::kAuto && engine != Engine::kBuffered)
    throw StorageError(ENOTSUP, path + ": this engine is not built in");
  return std::make_unique<FileStorage>(path, writable);
}

}  // namespace understudy::persistence
