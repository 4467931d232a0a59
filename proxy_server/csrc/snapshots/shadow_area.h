// An area of host memory owned by proxyd, in which commits keep what no replica holds (`shadow`) or, now and
// then, everything (`snapshot`).
//
// Blocks are never changed once a published manifest names them, so a server that dies at any instant leaves
// every published commit whole.  A block belongs to commits `first` to `last` (of `snapshot`: to snapshots,
// by serial).
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "replay/csrc/rewind/manifest.h"

namespace understudy::server {

class ShadowArea {
 public:
  explicit ShadowArea(const replay::Area& area) : area_(area) {}

  // What a server that died has published.
  struct Published {
    const replay::Manifest* manifest;
    const replay::CommitEntry* entry;
    uint64_t number;
  };

  // A new block for commit `commit`, or nothing if the area is full.
  std::optional<uint64_t> allocate(uint64_t bytes, uint64_t commit);
  // The same, but if it is not backed() whoever writes there has to get the memory first.
  std::optional<uint64_t> place(uint64_t bytes, uint64_t commit);
  bool backed(uint64_t offset, uint64_t bytes) const { return offset + bytes <= backed_; }
  // Where memory ends that is there for every byte, and where the blocks do.
  uint64_t backed_until() const { return backed_; }
  uint64_t used_until() const { return top_; }
  // All blocks of place() have their memory now.
  void all_backed() { backed_ = std::max(backed_, top_); }
  // The block is part of commit `commit` too.
  void keep(uint64_t offset, uint64_t commit);
  bool holds(uint64_t offset) const { return blocks_.contains(offset); }
  // Commits below `floor` will not be asked for again, but for these.
  void release(uint64_t floor, std::span<const uint64_t> but = {});
  // Commits above `target` are void.
  void rewind(uint64_t target);
  // A fresh server takes over: everything but what these name is free.
  void adopt(const std::vector<Published>& published);
  // Nothing is kept any more, and the memory is given back.
  void clear();
  const replay::Area& area() const { return area_; }
  uint8_t* at(uint64_t offset) const { return area_.data + offset; }
  uint64_t used() const { return used_; }

 private:
  struct Block {
    uint64_t bytes, first, last;  // commits
  };
  void insert(uint64_t offset, uint64_t bytes, uint64_t first, uint64_t last);
  std::map<uint64_t, Block>::iterator erase(std::map<uint64_t, Block>::iterator it);
  void find_free_space();

  replay::Area area_;
  std::map<uint64_t, Block> blocks_;                // by offset
  std::multimap<uint64_t, uint64_t> free_by_size_;  // bytes -> offset: warm pages first
  uint64_t top_ = 0, used_ = 0;
  uint64_t backed_ = 0;  // up to here there is memory for every byte
};

}  // namespace understudy::server
