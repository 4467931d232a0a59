// Memory of a GPU for pre-images: a few blocks of PyTorch's caching allocator, of which each takes a piece.
//
// As allocations of their own they would cut up the memory that the program's tensors come from. A block is
// taken at a commit, never amid a step, for what found no place since the commit before; that lies in single
// allocations once. It counts as memory that the allocator has given away.
//
// A piece is written by the one copy that makes its pre-image. Nobody else uses it on the device but a
// rewind, which copies out of it and waits. Whoever commits or rewinds lets the device pass all that was
// queued before, on all streams. So a piece that goes after the commit behind its copy is free at once,
// whichever stream is next to write there. Of one that goes earlier the copy may still be queued, on a stream
// that the next one does not follow: it is free when the device has passed (device_passed).
#pragma once
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "proxy_server/csrc/driver/driver.h"

namespace understudy::server {

class PreimageArena {
 public:
  explicit PreimageArena(const Driver& driver);

  // Memory for a pre-image, with anything in it; none where no block has so much, and that is noted. It may
  // be given back by any thread, and outlive the arena.
  std::optional<c10::Storage> take(uint64_t bytes);
  static bool holds(const c10::Storage& storage);

  // Nothing is queued on the device, on any stream.
  void device_passed();
  // At a commit, behind that: gets what was missing, if the device has it to spare, and gives up what has
  // long not been used.
  void adjust();
  // Blocks without a piece go back to the caching allocator. Whether there was one.
  bool give_up();
  // The program needs memory, or the device has none: it is long before the arena gets more.
  void keep_away();

  uint64_t bytes() const;

 private:
  struct Block;
  struct Blocks;
  struct Piece;
  void grow(uint64_t bytes);
  bool hardly_used();
  bool device_is_full() const;

  const Driver& driver_;
  const std::shared_ptr<Blocks> blocks_;  // pieces share it
  uint64_t missing_ = 0;                  // bytes, since the last commit
  uint64_t commits_ = 0, away_until_ = 0, away_for_;
};

}  // namespace understudy::server
