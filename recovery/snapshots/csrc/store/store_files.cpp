#include "recovery/snapshots/csrc/store/store_files.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "recovery/snapshots/csrc/storage/file_handle.h"

namespace understudy::persistence {
namespace {

// Asked before anything is opened: to open a pipe would wait for its other end.
bool is_partition(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) throw StorageError(errno, path + " cannot be opened");
  if (!S_ISREG(found.st_mode) && !S_ISBLK(found.st_mode))
    throw StoreError(path + " is neither a file nor a partition");
  return S_ISBLK(found.st_mode);
}

bool exists(const std::string& path) {
  struct stat found{};
  return ::stat(path.c_str(), &found) == 0;
}

// One writer at a time; the kernel lets go when its process dies.
std::shared_ptr<FileHandle> writer_lock(const std::string& path) {
  auto file = std::make_shared<FileHandle>(path, O_RDONLY);
  if (::flock(file->number(), LOCK_EX | LOCK_NB) == 0) return file;
  if (errno == EWOULDBLOCK)
    throw StoreError(path +
                     " is being written by another process or store: close that one first, or open this for "
                     "reading only");
  throw StorageError(errno, path + " cannot be locked");
}

void format_file(const std::string& path, const Geometry& geometry) {
  const std::unique_ptr<Storage> storage = open_storage(path, Engine::kAuto, true);
  Store::format(*storage, geometry);
}

}  // namespace

void create_store(const std::string& path, const Geometry& geometry) {
  if (const std::string wrong = geometry.wrong(); !wrong.empty()) throw StoreError(wrong);
  if (!exists(path) || !is_partition(path)) {
    create_file(path, geometry.store_bytes());
    try {
      format_file(path, geometry);
    } catch (...) {
      ::unlink(path.c_str());
      throw;
    }
    return;
  }
  const std::shared_ptr<FileHandle> lock = writer_lock(path);
  const std::unique_ptr<Storage> storage = open_storage(path, Engine::kAuto, true);
  const AlignedMemory memory = aligned_memory(2 * kBlock);
  storage->read(0, memory.get(), 2 * kBlock);
  if (std::any_of(memory.get(), memory.get() + 2 * kBlock, [](uint8_t byte) { return byte != 0; }))
    throw StoreError(path +
                     " holds something: a store is only made on a partition that begins with 8192 zeros. If "
                     "nobody needs what is there, write them and try again; nothing was changed");
  Store::format(*storage, geometry);
}

std::shared_ptr<Store> open_store(const std::string& path, Engine engine, StoreOptions options,
                                  std::string* notes) {
  options.exact = !is_partition(path);
  if (options.exact && std::filesystem::file_size(path) == 0) throw too_small(path, 0);
  std::shared_ptr<FileHandle> lock;
  if (options.writable) lock = writer_lock(path);
  auto store = std::make_shared<Store>(open_storage(path, engine, options.writable, notes), options, lock);
  if (notes != nullptr && !store->note().empty()) *notes += (notes->empty() ? "" : " ") + store->note() + ".";
  return store;
}

}  // namespace understudy::persistence
