// Reading snapshots, whatever the storage holds: a damaged or malicious store, or one that another process
// writes at this moment.  Bytes are only answered if all checksums between them and a superblock are right.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "recovery/persistence/csrc/commit_rule.h"
#include "recovery/persistence/csrc/storage.h"
#include "recovery/persistence/csrc/store_format.h"

namespace understudy::persistence {

// Where to read: a store's identity and sizes, taken from a checked superblock.
struct Place {
  const Storage& storage;
  Geometry geometry;
  Uuid uuid;
};

// The header of a slot, or none if it is damaged, claims what does not fit, or is of another slot or store.
std::optional<SlotHeader> read_header(const Place& place, uint32_t slot);

struct Tables {
  std::vector<Extent> extents;
  std::vector<uint64_t> digests;  // of each chunk
};

// The checked tables of a snapshot.  Precondition: `header` is an answer of read_header().  Throws
// StoreError.
Tables read_tables(const Place& place, const SlotHeader& header);

// Where a part of the payload is to go.
struct Piece {
  uint64_t offset;
  uint8_t* to;
  uint64_t bytes;
};

// Fills the pieces, and reads each chunk from the first to the last that they touch once.  Throws StoreError
// if one is damaged (then they hold anything), and StorageError.  Precondition: inside the payload; offsets
// rise, and they do not overlap.
void read_payload(const Place& place, const SlotHeader& header, const Tables& tables,
                  const std::vector<Piece>& pieces);

// The chunks whose content is not what it was, in order; one that the storage cannot read (EIO) is among
// them.
std::vector<uint64_t> damaged_chunks(const Place& place, const SlotHeader& header, const Tables& tables);

// Where one superblock is lost, the other may be the older one.  Registers in it what only the lost one may
// have known: a snapshot that is newer than all, and whole.  Answers a sentence about each.
std::string adopt_newer(const Place& place, Registry& registry);

}  // namespace understudy::persistence
