// One buffer through a storage by several threads, in blocks: for tests and measurements.
#pragma once
#include <cstdint>
#include <functional>

#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

struct BlockPlan {
  uint64_t bytes;
  uint64_t block;
  uint32_t threads;
  uint32_t depth;  // blocks under way per thread; an engine may do with fewer
  uint64_t seed;   // other than 0: blocks in an order of its making
};

// Runs `work(first, step)` in plan.threads threads, first = 0, 1, …, step = their number; then throws what
// the first of them threw.
void in_threads(uint32_t threads, const std::function<void(uint64_t first, uint64_t step)>& work);

// Writes `data` at `offset`.  Not durable until sync().
void write_blocks(Storage& storage, uint64_t offset, const uint8_t* data, const BlockPlan& plan);
void read_blocks(const Storage& storage, uint64_t offset, uint8_t* data, const BlockPlan& plan);

}  // namespace understudy::persistence
