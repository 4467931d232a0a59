// Reading and writing the two superblocks.
#pragma once
#include <string>

#include "recovery/snapshots/csrc/format/commit_rule.h"
#include "recovery/snapshots/csrc/format/store_format.h"
#include "recovery/snapshots/csrc/storage/storage.h"

namespace understudy::persistence {

struct StoreFacts {
  Superblock block{};  // the newer valid one
  Geometry geometry;
  Registry registry;
  bool newer_headers_count = false;  // see kNewerHeadersCount
  std::string note;                  // a sentence about the other one if it is damaged, else empty
};

StoreError too_small(const std::string& name, uint64_t bytes);

// A superblock of a new store, not sealed.
Superblock new_superblock(const Geometry& geometry);

// Takes the valid superblock with the higher epoch.  Writes nothing.  `exact`: the storage must be just as
// large as the store (a file; a partition may be larger).  Throws StoreError with a sentence that says what
// to do, and StorageError.
StoreFacts read_superblocks(const Storage& storage, bool exact);

// `like` with what changes taken from `registry`, sealed.
Superblock sealed(Superblock like, const Registry& registry);

// Where the superblock of an epoch lies.
constexpr uint64_t superblock_offset(uint64_t epoch) { return epoch % 2 * kBlock; }

}  // namespace understudy::persistence
