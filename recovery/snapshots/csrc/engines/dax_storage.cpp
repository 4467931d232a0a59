#include "recovery/snapshots/csrc/engines/dax_storage.h"

#include <sys/mman.h>

#include <cerrno>

#include "recovery/snapshots/csrc/engines/file_storage.h"
#include "recovery/snapshots/csrc/engines/prompt_writer.h"

namespace understudy::persistence {
namespace {

// Only MAP_SHARED_VALIDATE makes the kernel refuse flags it cannot honour.  MAP_SYNC: a fault that allocates
// is durable before the store goes on, so that no file system call is needed after it.
constexpr int kSynchronous = MAP_SHARED_VALIDATE | MAP_SYNC;

bool maps_synchronously(const StorageFile& file) {
  try {
    FileMapping(file, kSynchronous);
    return true;
  } catch (const StorageError& error) {
    if (error.code().value() == EOPNOTSUPP || error.code().value() == EINVAL) return false;
    throw;
  }
}

bool is_persistent_memory(const StorageFile& file, bool emulate) {
  if (!can_stream(Stream::kSse2))
    throw StorageError(ENOTSUP, "dax needs the non-temporal stores of an x86-64 processor");
  const bool real = maps_synchronously(file);
  if (!real && !emulate)
    throw StorageError(ENOTSUP, file.path() + " is not on persistent memory (no MAP_SYNC)");
  return real;
}

}  // namespace

DaxStorage::DaxStorage(const std::string& path, bool writable, bool emulate)
    : file_(path, writable, false),
      real_(is_persistent_memory(file_, emulate)),
      stream_(best_stream()),
      mapping_(file_, real_ ? kSynchronous : MAP_SHARED),
      sync_(path, [this](uint64_t begin, uint64_t end) { return mapping_.flush(begin, end); }) {}

std::unique_ptr<Writer> DaxStorage::writer() {
  file_.check_writable();
  return std::make_unique<PromptWriter>([this](uint64_t offset, const uint8_t* data, uint64_t bytes) {
    file_.check("write", offset, data, bytes);
    if (!mapping_.prepare(offset, bytes)) {
      file_.write(offset, data, bytes);
      // On persistent memory nothing will flush this later: sync() relies on fences.
      if (const int error = real_ ? flush_file(file_.fd()) : 0) file_.fail(error, "write", offset, bytes);
      return;
    }
    stream_copy(stream_, mapping_.data() + offset, data, bytes);
    fence_stores();
  });
}

void DaxStorage::sync(uint64_t offset, uint64_t bytes) {
  file_.check_writable();
  file_.check("sync", offset, nullptr, bytes);
  if (!real_) sync_.sync(offset, offset + bytes);
}

}  // namespace understudy::persistence
