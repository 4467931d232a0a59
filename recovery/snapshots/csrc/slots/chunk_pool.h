// The memory through which snapshots go to storage: so many chunks, shared by all that are under way.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>

#include "recovery/snapshots/csrc/format/store_format.h"
#include "recovery/snapshots/csrc/slots/index_ring.h"
#include "recovery/snapshots/csrc/slots/platform.h"

namespace understudy::persistence {

class ChunkPool {
 public:
  ChunkPool(uint64_t chunk_bytes, uint32_t chunks)
      : chunk_bytes_(chunk_bytes), memory_(aligned_memory(chunk_bytes * chunks)), free_(chunks) {
    for (uint32_t chunk = 0; chunk < chunks; chunk++) free_.push(chunk);
  }

  uint8_t* memory(uint32_t chunk) const { return memory_.get() + chunk * chunk_bytes_; }

  // None if all are in use, or if somebody waits for one who has none.
  std::optional<uint32_t> try_take() {
    uint32_t chunk = 0;
    if (waiting_.load(std::memory_order_relaxed) != 0 || !free_.pop(chunk)) return std::nullopt;
    return chunk;
  }

  // Waits for one.  Precondition: the caller holds none, so that whoever holds one can go on and give it
  // back.
  uint32_t take() {
    uint32_t chunk = 0;
    if (free_.pop(chunk)) return chunk;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
      const uint32_t seen = returned_.now();
      if (free_.pop(chunk)) break;
      returned_.wait(seen, kNever);
    }
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return chunk;
  }

  void give_back(uint32_t chunk) {
    free_.push(chunk);
    returned_.raise();
  }

 private:
  const uint64_t chunk_bytes_;
  const AlignedMemory memory_;
  IndexRing<RealPlatform> free_;
  Event returned_;
  std::atomic<uint32_t> waiting_{0};
};

}  // namespace understudy::persistence
