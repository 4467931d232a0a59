// A writer whose writes are over when submit() returns.
#pragma once
#include <cerrno>
#include <functional>
#include <optional>
#include <utility>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

class PromptWriter final : public Writer {
 public:
  using Write = std::function<void(uint64_t offset, const uint8_t* data, uint64_t bytes)>;

  explicit PromptWriter(Write write) : write_(std::move(write)) {}

  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) override {
    if (written_) throw StorageError(EBUSY, "a write is under way; wait() for it before the next one");
    write_(offset, data, bytes);
    written_ = token;
  }
  uint32_t depth() const override { return 1; }
  uint64_t wait() override {
    if (!written_) throw StorageError(EINVAL, "asked to wait for a write, and none is under way");
    return *std::exchange(written_, std::nullopt);
  }

 private:
  const Write write_;
  std::optional<uint64_t> written_;
};

}  // namespace understudy::persistence
