// Counts what is alive, and what was: the numbers of torch.cuda.memory_stats().
#pragma once
#include <algorithm>
#include <cstdint>

#include "replay/csrc/log/log_format.h"

namespace understudy::replay {

class Usage {
 public:
  void add(uint64_t bytes) {
    grow(bytes_, bytes);
    grow(blocks_, 1);
  }
  void remove(uint64_t bytes) {
    shrink(bytes_, bytes);
    shrink(blocks_, 1);
  }
  void clear() { bytes_.current = blocks_.current = 0; }
  void reset_peak() {
    for (MemoryCounter* c : {&bytes_, &blocks_}) c->peak = c->current;
  }
  void reset_accumulated() {
    for (MemoryCounter* c : {&bytes_, &blocks_}) c->allocated = c->freed = 0;
  }
  const MemoryCounter& bytes() const { return bytes_; }
  const MemoryCounter& blocks() const { return blocks_; }

 private:
  static void grow(MemoryCounter& c, uint64_t by) {
    c.current += by;
    c.allocated += by;
    c.peak = std::max(c.peak, c.current);
  }
  static void shrink(MemoryCounter& c, uint64_t by) {
    c.current -= by;
    c.freed += by;
  }

  MemoryCounter bytes_{}, blocks_{};
};

}  // namespace understudy::replay
