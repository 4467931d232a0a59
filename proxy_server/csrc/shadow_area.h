// The shadow area: host memory owned by proxyd in which commits keep what no replica holds.
//
// Blocks are never changed once a published manifest names them, so a server that dies at any instant leaves
// every published commit whole.
#pragma once
#include <cstdint>
#include <map>
#include <optional>

#include "replay/csrc/manifest.h"

namespace understudy::server {

class ShadowArea {
 public:
  explicit ShadowArea(const replay::LogMap& log) : log_(log) {}

  // A new block for commit `commit`, or nothing if the area is full.
  std::optional<uint64_t> allocate(uint64_t bytes, uint64_t commit);
  // The block is part of commit `commit` too.
  void keep(uint64_t offset, uint64_t commit);
  // Commits below `floor` will not be asked for again.
  void release(uint64_t floor);
  // Commits above `target` are void.
  void rewind(uint64_t target);
  // A fresh server takes over: everything but `manifest` (at `entry`) is free.
  void adopt(const replay::Manifest& manifest, const replay::CommitEntry& entry);
  uint8_t* at(uint64_t offset) const { return log_.shadow() + offset; }
  uint64_t used() const { return used_; }

 private:
  struct Block {
    uint64_t bytes, first, last;  // commits
  };
  void insert(uint64_t offset, uint64_t bytes, uint64_t first, uint64_t last);
  std::map<uint64_t, Block>::iterator erase(std::map<uint64_t, Block>::iterator it);

  const replay::LogMap& log_;
  std::map<uint64_t, Block> blocks_;                // by offset
  std::multimap<uint64_t, uint64_t> free_by_size_;  // bytes -> offset: warm pages first
  uint64_t top_ = 0, used_ = 0;
};

}  // namespace understudy::server
