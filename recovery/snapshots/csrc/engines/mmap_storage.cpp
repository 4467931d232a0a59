#include "recovery/snapshots/csrc/engines/mmap_storage.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "recovery/snapshots/csrc/engines/prompt_writer.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace understudy::persistence {
namespace {

constexpr uint64_t kPage = 4096;

}  // namespace

FileMapping::FileMapping(const StorageFile& file, int flags) : data_(nullptr), bytes_(file.bytes()) {
  const int protection = file.writable() ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address = mmap(nullptr, bytes_, protection, flags, file.fd(), 0);
  if (address == MAP_FAILED) throw StorageError(errno, "cannot map " + file.path());
  data_ = static_cast<uint8_t*>(address);
}

FileMapping::~FileMapping() { munmap(data_, bytes_); }

bool FileMapping::prepare(uint64_t offset, uint64_t bytes) const {
  const uint64_t first = offset / kPage * kPage;
  if (madvise(data_ + first, offset + bytes - first, MADV_POPULATE_WRITE) == 0) return true;
  return errno == EINVAL;  // a kernel before 5.14: nothing can be said
}

int FileMapping::flush(uint64_t begin, uint64_t end) const {
  if (begin >= end) return 0;
  const uint64_t first = begin / kPage * kPage;
  while (msync(data_ + first, end - first, MS_SYNC) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

MmapStorage::MmapStorage(const std::string& path, bool writable)
    : file_(path, writable, false),
      mapping_(file_, MAP_SHARED),
      sync_(path, [this](uint64_t begin, uint64_t end) { return mapping_.flush(begin, end); }) {}

std::unique_ptr<Writer> MmapStorage::writer() {
  file_.check_writable();
  return std::make_unique<PromptWriter>([this](uint64_t offset, const uint8_t* data, uint64_t bytes) {
    file_.check("write", offset, data, bytes);
    if (mapping_.prepare(offset, bytes))
      std::memcpy(mapping_.data() + offset, data, bytes);
    else
      file_.write(offset, data, bytes);
  });
}

void MmapStorage::sync(uint64_t offset, uint64_t bytes) {
  file_.check_writable();
  file_.check("sync", offset, nullptr, bytes);
  sync_.sync(offset, offset + bytes);
}

}  // namespace understudy::persistence
