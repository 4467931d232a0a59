// Engine "uring": direct I/O with many writes under way per thread, through io_uring.
#pragma once
#include <memory>
#include <string>

#include "recovery/snapshots/csrc/engines/file_storage.h"

namespace understudy::persistence {

// Single reads and flushes are those of "direct"; each writer and reader has a ring of its own, so that
// threads share nothing.
class UringStorage final : public FileStorage {
 public:
  // Throws StorageError, with the reason, where the kernel has no io_uring for us.
  UringStorage(const std::string& path, bool writable);

  const char* engine() const override { return "uring"; }
  // A writer whose wait() has thrown may go on with its other writes; its destructor waits for them, because
  // until they end the kernel reads the memory they were given.
  std::unique_ptr<Writer> writer() override;
  std::unique_ptr<Reader> reader() const override;
};

}  // namespace understudy::persistence
