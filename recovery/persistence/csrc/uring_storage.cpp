#include "recovery/persistence/csrc/uring_storage.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "recovery/persistence/csrc/ring.h"

namespace understudy::persistence {
namespace {

constexpr uint32_t kDepth = 32;
constexpr uint64_t kLargestWrite = 1ull << 30;  // the kernel counts bytes of one write in 31 bits
constexpr uint32_t kTries = 5000;               // a millisecond apart, while the kernel is short of memory

bool worth_another_try(int number) { return number == EINTR || number == EAGAIN || number == EBUSY; }

class UringWriter final : public Writer {
 public:
  explicit UringWriter(const StorageFile& file) : file_(file), ring_(kDepth) {
    for (uint32_t i = 0; i < kDepth; i++) free_.push_back(i);
  }

  ~UringWriter() override {
    try {
      while (free_.size() < kDepth) end_one();
    } catch (const StorageError&) {
      // The ring itself is broken; closing it cancels what is left.
    }
  }

  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) override {
    file_.check("write", offset, data, bytes);
    if (free_.empty())
      throw StorageError(EBUSY,
                         std::to_string(kDepth) + " writes are under way; wait() for one before the next");
    const uint32_t slot = free_.back();
    free_.pop_back();
    writes_[slot] = {offset, data, bytes, token, 0};
    queue(slot);
    // A kernel that has no room just now takes it with the next call; wait() sees to that.
    if (const int error = ring_.enter(false); error != 0 && !worth_another_try(error))
      throw StorageError(error, "io_uring takes no writes to " + file_.path());
  }

  uint32_t depth() const override { return kDepth; }

  uint64_t wait() override {
    if (free_.size() == kDepth)
      throw StorageError(EINVAL, "asked to wait for a write, and none is under way");
    const Ended ended = end_one();
    const Write& write = writes_[ended.slot];
    if (ended.error != 0) file_.fail(ended.error, "write", write.offset, write.left);
    return write.token;
  }

 private:
  struct Write {
    uint64_t offset;
    const uint8_t* data;
    uint64_t left;
    uint64_t token;
    uint32_t tries;
  };
  struct Ended {
    uint32_t slot;
    int error;
  };

  void queue(uint32_t slot) {
    const Write& w = writes_[slot];
    ring_.queue_write(file_.fd(), w.offset, w.data, static_cast<uint32_t>(std::min(w.left, kLargestWrite)),
                      slot);
  }

  // Goes on until a write has ended, one way or the other.  Throws only if the ring itself fails.
  Ended end_one() {
    for (uint32_t tries = 0;;) {
      while (const auto done = ring_.take()) {
        const auto slot = static_cast<uint32_t>(done->user);
        const std::optional<int> error = outcome(writes_[slot], done->result);
        if (error) {
          free_.push_back(slot);
          return {slot, *error};
        }
        queue(slot);
      }
      // Waiting is right even while something is queued: enter() sleeps only if it has handed all of it over.
      const int error = ring_.enter(true);
      if (error == 0 || error == EINTR) continue;
      if (!worth_another_try(error) || ++tries > kTries)
        throw StorageError(error, "io_uring does not go on with writes to " + file_.path());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // None: the rest of the write is to be queued again.
  std::optional<int> outcome(Write& write, int32_t result) const {
    if (result < 0 && worth_another_try(-result) && ++write.tries <= kTries) return std::nullopt;
    if (result < 0) return -result;
    const auto moved = static_cast<uint64_t>(result);
    if (moved == write.left) return 0;
    const uint64_t whole = file_.whole_blocks(moved);
    if (whole == 0) return EIO;  // no progress: it would never end
    write.offset += whole, write.data += whole, write.left -= whole;
    return std::nullopt;
  }

  const StorageFile& file_;
  Ring ring_;
  std::array<Write, kDepth> writes_{};
  std::vector<uint32_t> free_;
};

}  // namespace

UringStorage::UringStorage(const std::string& path, bool writable) : FileStorage(path, writable, true) {
  if (writable) const Ring trial(kDepth);  // so that a refusal is known now, not in some thread later
}

std::unique_ptr<Writer> UringStorage::writer() {
  file().check_writable();
  return std::make_unique<UringWriter>(file());
}

}  // namespace understudy::persistence
