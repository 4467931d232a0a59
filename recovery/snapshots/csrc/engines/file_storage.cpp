#include "recovery/snapshots/csrc/engines/file_storage.h"

#include <unistd.h>

#include <cerrno>

#include "recovery/snapshots/csrc/engines/prompt_writer.h"

namespace understudy::persistence {

int flush_file(int fd) {
  while (fdatasync(fd) != 0)
    if (errno != EINTR) return errno;  // interrupted: nothing was told yet, so nothing is missed
  return 0;
}

// Direct writes need the flush, too: the device may hold them in a volatile cache, and blocks that were
// allocated and never written become readable only with a change of metadata.
FileStorage::FileStorage(const std::string& path, bool writable, bool direct)
    : direct_(direct),
      file_(path, writable, direct),
      sync_(path, [fd = file_.fd()](uint64_t, uint64_t) { return flush_file(fd); }) {}

std::unique_ptr<Writer> FileStorage::writer() {
  file_.check_writable();
  return std::make_unique<PromptWriter>([this](uint64_t offset, const uint8_t* data, uint64_t bytes) {
    file_.check("write", offset, data, bytes);
    file_.write(offset, data, bytes);
  });
}

void FileStorage::sync() {
  file_.check_writable();
  sync_.sync(0, file_.bytes());
}

void FileStorage::sync(uint64_t, uint64_t) { sync(); }

}  // namespace understudy::persistence
