#include <cerrno>
#include <optional>
#include <utility>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {
namespace {

class PromptReader final : public Reader {
 public:
  explicit PromptReader(const Storage& storage) : storage_(storage) {}

  void submit(uint64_t offset, uint8_t* to, uint64_t bytes, uint64_t token) override {
    if (ended_) throw StorageError(EBUSY, "a read is under way; wait() for it before the next one");
    bool read = true;
    try {
      storage_.read(offset, to, bytes);
    } catch (const StorageError& e) {
      if (e.code().value() != EIO) throw;
      read = false;
    }
    ended_ = Ended{token, read};
  }
  uint32_t depth() const override { return 1; }
  Ended wait() override {
    if (!ended_) throw StorageError(EINVAL, "asked to wait for a read, and none is under way");
    return *std::exchange(ended_, std::nullopt);
  }

 private:
  const Storage& storage_;
  std::optional<Ended> ended_;
};

}  // namespace

std::unique_ptr<Reader> Storage::reader() const { return std::make_unique<PromptReader>(*this); }

}  // namespace understudy::persistence
