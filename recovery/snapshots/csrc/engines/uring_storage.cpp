#include "recovery/snapshots/csrc/engines/uring_storage.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "recovery/snapshots/csrc/engines/ring.h"

namespace understudy::persistence {
namespace {

constexpr uint32_t kDepth = 32;
constexpr uint64_t kLargest = 1ull << 30;  // the kernel counts bytes of one write in 31 bits
constexpr uint32_t kTries = 5000;          // a millisecond apart, while the kernel is short of memory

bool worth_another_try(int number) { return number == EINTR || number == EAGAIN || number == EBUSY; }

// Writes or reads under way, of one thread.
class Transfers {
 public:
  struct Ended {
    uint64_t token, offset, left;
    int error;
  };

  Transfers(const StorageFile& file, bool write) : file_(file), write_(write), ring_(kDepth) {
    for (uint32_t i = 0; i < kDepth; i++) free_.push_back(i);
  }

  ~Transfers() {
    try {
      while (free_.size() < kDepth) end_one();
    } catch (const StorageError&) {
      // The ring itself is broken; closing it cancels what is left.
    }
  }

  const char* verb() const { return write_ ? "write" : "read"; }

  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) {
    file_.check(verb(), offset, data, bytes);
    if (free_.empty())
      throw StorageError(
          EBUSY, std::to_string(kDepth) + " " + verb() + "s are under way; wait() for one before the next");
    const uint32_t slot = free_.back();
    free_.pop_back();
    transfers_[slot] = {offset, data, bytes, token, 0};
    queue(slot);
    // A kernel that has no room just now takes it with the next call; wait() sees to that.
    if (const int error = ring_.enter(false); error != 0 && !worth_another_try(error))
      throw StorageError(error, "io_uring takes nothing more for " + file_.path());
  }

  Ended wait() {
    if (free_.size() == kDepth)
      throw StorageError(EINVAL, std::string("asked to wait for a ") + verb() + ", and none is under way");
    return end_one();
  }

 private:
  struct Transfer {
    uint64_t offset;
    const uint8_t* data;  // the kernel writes there, if this reads
    uint64_t left;
    uint64_t token;
    uint32_t tries;
  };

  void queue(uint32_t slot) {
    const Transfer& t = transfers_[slot];
    ring_.queue(write_ ? IORING_OP_WRITE : IORING_OP_READ, file_.fd(), t.offset, t.data,
                static_cast<uint32_t>(std::min(t.left, kLargest)), slot);
  }

  // Goes on until one has ended, one way or the other.  Throws only if the ring itself fails.
  Ended end_one() {
    for (uint32_t tries = 0;;) {
      while (const auto done = ring_.take()) {
        const auto slot = static_cast<uint32_t>(done->user);
        Transfer& transfer = transfers_[slot];
        if (const std::optional<int> error = outcome(transfer, done->result)) {
          free_.push_back(slot);
          return {transfer.token, transfer.offset, transfer.left, *error};
        }
        queue(slot);
      }
      // Waiting is right even while something is queued: enter() sleeps only if it has handed all of it over.
      const int error = ring_.enter(true);
      if (error == 0 || error == EINTR) continue;
      if (!worth_another_try(error) || ++tries > kTries)
        throw StorageError(error, "io_uring does not go on with " + file_.path());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // None: the rest is to be queued again.
  std::optional<int> outcome(Transfer& t, int32_t result) const {
    if (result < 0 && worth_another_try(-result) && ++t.tries <= kTries) return std::nullopt;
    if (result < 0) return -result;
    const auto moved = static_cast<uint64_t>(result);
    if (moved == t.left) return 0;
    const uint64_t whole = file_.whole_blocks(moved);
    if (whole == 0) return EIO;  // no progress: it would never end
    t.offset += whole, t.data += whole, t.left -= whole;
    return std::nullopt;
  }

  const StorageFile& file_;
  const bool write_;
  Ring ring_;
  std::array<Transfer, kDepth> transfers_{};
  std::vector<uint32_t> free_;
};

class UringWriter final : public Writer {
 public:
  explicit UringWriter(const StorageFile& file) : file_(file), transfers_(file, true) {}
  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) override {
    transfers_.submit(offset, data, bytes, token);
  }
  uint32_t depth() const override { return kDepth; }
  uint64_t wait() override {
    const Transfers::Ended ended = transfers_.wait();
    if (ended.error != 0) file_.fail(ended.error, "write", ended.offset, ended.left);
    return ended.token;
  }

 private:
  const StorageFile& file_;
  Transfers transfers_;
};

class UringReader final : public Reader {
 public:
  explicit UringReader(const StorageFile& file) : file_(file), transfers_(file, false) {}
  void submit(uint64_t offset, uint8_t* to, uint64_t bytes, uint64_t token) override {
    transfers_.submit(offset, to, bytes, token);
  }
  uint32_t depth() const override { return kDepth; }
  Ended wait() override {
    const Transfers::Ended ended = transfers_.wait();
    if (ended.error != 0 && ended.error != EIO) file_.fail(ended.error, "read", ended.offset, ended.left);
    return {ended.token, ended.error == 0};
  }

 private:
  const StorageFile& file_;
  Transfers transfers_;
};

}  // namespace

UringStorage::UringStorage(const std::string& path, bool writable) : FileStorage(path, writable, true) {
  if (writable) const Ring trial(kDepth);  // so that a refusal is known now, not in some thread later
}

std::unique_ptr<Reader> UringStorage::reader() const {
  try {
    return std::make_unique<UringReader>(file());
  } catch (const StorageError&) {
    return Storage::reader();  // reading goes without, only slower
  }
}

std::unique_ptr<Writer> UringStorage::writer() {
  file().check_writable();
  return std::make_unique<UringWriter>(file());
}

}  // namespace understudy::persistence
