// What a snapshot still has to copy, for several threads: the copier's, and the executor's where something is
// about to change.
//
// Rows are cut into pieces. Who claims one copies it, so each is copied once:
//
//   unclaimed ──compare-and-swap──▶ copying ──▶ done
//
// settle() is what makes a change safe: it copies what nobody has claimed, and waits for the one piece at
// most that another thread is in the middle of.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "replay/csrc/digest/digest.h"

namespace understudy::server {

struct CopyRow {
  uint64_t bytes = 0;
  uint8_t* to = nullptr;
  bool copies = false;  // false: its content is at `to` already
  bool fresh = false;   // memory for it may not be there yet
  bool digests = false;
  uint64_t digest = 0;  // of `to`, once it is finished() if `digests`
  bool digested = false;
};

class CopyList {
 public:
  // Copies bytes of a row to where they belong; any thread that is let at the list calls it.
  using Copy = std::function<void(size_t row, uint64_t offset, uint64_t bytes, uint8_t* to)>;
  static constexpr uint64_t kPiece = 256 << 10;  // bytes: a change waits for no more

  // `prepare`: called by run() before it copies.
  CopyList(std::vector<CopyRow> rows, Copy copy, uint64_t piece_bytes = kPiece,
           std::function<void()> prepare = {});

  // Copies about so many bytes, in order; whether there may be more to claim.
  bool copy_some(uint64_t bytes);
  // The row is copied when this returns, unless failed().
  void settle(size_t row);
  // What is left once copy_some() has said that there is no more to claim: digests.
  void finish();
  // Copies and finishes all that others leave. Says what a copy has thrown.
  void run();

  // All is copied, with digests. Whoever sees this sees them, too.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // There is no memory for it, or its source cannot be read; what is left is not copied.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Whoever copies stops soon.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

  const std::vector<CopyRow>& rows() const { return rows_; }
  uint64_t bytes() const { return bytes_; }

 private:
  enum : uint32_t { kUnclaimed, kCopying, kDone };
  struct Piece {
    std::atomic<uint32_t> state{kUnclaimed};
    uint32_t row = 0;
  };

  // Whether it was ours to copy.
  bool claim(size_t piece);
  // A row that one thread copies from its beginning to its end is digested piece by piece, while the caches
  // have them; finish() does the others.
  struct Digesting {
    replay::ContentDigest digest;
    bool whole = false;  // all pieces before `next`
    size_t next = 0;     // another thread may have taken it
  };
  void digest_copied(size_t piece, bool ours, Digesting& digesting);
  void wait_for(size_t piece);
  static void done(Piece& piece);

  std::vector<CopyRow> rows_;
  const Copy copy_;
  const uint64_t piece_bytes_;
  const std::function<void()> prepare_;
  std::vector<size_t> first_;  // piece of each row, and where the last one's end
  std::unique_ptr<Piece[]> pieces_;
  std::atomic<size_t> next_{0};  // pieces before it are claimed
  uint64_t bytes_ = 0;
  std::atomic<bool> finished_{false}, failed_{false}, cancelled_{false};
};

}  // namespace understudy::server
