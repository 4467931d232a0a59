// Making a storage's file, and choosing an engine for one.
//
// A Storage and its writers belong to the process that opened them.  A forked child must not use them: it
// would share the queues of io_uring and the memory of mappings with its parent.  What it inherits is closed
// by exec.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <limits>

#include "recovery/snapshots/csrc/engines/dax_storage.h"
#include "recovery/snapshots/csrc/engines/file_storage.h"
#include "recovery/snapshots/csrc/engines/mmap_storage.h"
#include "recovery/snapshots/csrc/engines/uring_storage.h"
#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {
namespace {

// posix_fallocate by itself would emulate, by writing to each block, wherever the file system cannot
// allocate.
int allocate(int fd, uint64_t bytes) {
  while (fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    return errno == EOPNOTSUPP ? posix_fallocate(fd, 0, static_cast<off_t>(bytes)) : errno;
  }
  return 0;
}

void sync_directory_of(const std::string& path) {
  const std::string folder = std::filesystem::absolute(path).parent_path();
  const Descriptor fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0 || fsync(fd.get()) != 0)
    throw StorageError(errno, "cannot make the entry durable in " + folder);
}

void fill_file(int fd, const std::string& path, uint64_t bytes) {
  if (fchmod(fd, 0600) != 0) throw StorageError(errno, "cannot protect " + path);  // whatever the umask is
  if (const int error = allocate(fd, bytes); error != 0)
    throw StorageError(error, "cannot allocate " + std::to_string(bytes) + " bytes for " + path);
  if (fsync(fd) != 0) throw StorageError(errno, "cannot make " + path + " durable");
  sync_directory_of(path);
}

void add_sentence(std::string* notes, const std::string& sentence) {
  if (notes != nullptr) *notes += (notes->empty() ? "" : " ") + sentence + ".";
}

std::unique_ptr<Storage> open_dax(const std::string& path, bool writable, std::string* notes) {
  auto storage = std::make_unique<DaxStorage>(path, writable, true);
  if (!storage->real())
    add_sentence(
        notes,
        "dax is emulated: " + path +
            " is not on persistent memory, so its pages are cached and msync makes them durable as far "
            "as the file system is (tmpfs is not)");
  return storage;
}

std::unique_ptr<Storage> open_first(const std::string& path, bool writable, std::string* notes) {
  StorageFile(path, writable, false);  // what no engine could open is said once
  try {
    return std::make_unique<DaxStorage>(path, writable, false);
  } catch (const StorageError& error) {
    add_sentence(notes, std::string("Not dax: ") + error.what());
  }
  try {
    return std::make_unique<UringStorage>(path, writable);
  } catch (const StorageError& error) {
    add_sentence(notes, std::string("Not uring: ") + error.what());
  }
  try {
    return std::make_unique<FileStorage>(path, writable, true);
  } catch (const StorageError& error) {
    add_sentence(notes, std::string("Not direct: ") + error.what());
  }
  return std::make_unique<FileStorage>(path, writable, false);
}

}  // namespace

void create_file(const std::string& path, uint64_t bytes) {
  if (bytes == 0) throw StorageError(EINVAL, "a storage of 0 bytes holds nothing: " + path);
  if (bytes > static_cast<uint64_t>(std::numeric_limits<off_t>::max()))
    throw StorageError(EFBIG, "no file has " + std::to_string(bytes) + " bytes: " + path);
  const Descriptor fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) throw StorageError(errno, "cannot create " + path);
  try {
    fill_file(fd.get(), path, bytes);
  } catch (...) {
    unlink(path.c_str());  // half a file would be taken for a whole one next time
    throw;
  }
}

std::unique_ptr<Storage> open_storage(const std::string& path, Engine engine, bool writable,
                                      std::string* notes) {
  if (notes != nullptr) notes->clear();
  switch (engine) {
    case Engine::kAuto:
      return open_first(path, writable, notes);
    case Engine::kUring:
      return std::make_unique<UringStorage>(path, writable);
    case Engine::kDirect:
      return std::make_unique<FileStorage>(path, writable, true);
    case Engine::kBuffered:
      return std::make_unique<FileStorage>(path, writable, false);
    case Engine::kMmap:
      return std::make_unique<MmapStorage>(path, writable);
    case Engine::kDax:
      return open_dax(path, writable, notes);
  }
  throw StorageError(EINVAL, "no such engine");
}

}  // namespace understudy::persistence
