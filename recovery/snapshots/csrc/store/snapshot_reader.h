// Reading snapshots, whatever the storage holds: a damaged or malicious store, or one that another process
// writes at this moment.  Bytes are only answered if all checksums between them and a superblock are right.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/snapshots/csrc/format/commit_rule.h"
#include "recovery/snapshots/csrc/format/store_format.h"
#include "recovery/snapshots/csrc/storage/storage.h"
#include "recovery/snapshots/csrc/store/unit_reader.h"

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
  std::vector<Unit> units;  // what has a digest: these extents, or the chunks of the payload
  // What a unit is called.
  std::string what(const Geometry& geometry, size_t unit) const;
};

// The checked tables of a snapshot.  Precondition: `header` is an answer of read_header().  Throws
// StoreError.
Tables read_tables(const Place& place, const SlotHeader& header);

// Fills the pieces, and reads each unit that they touch once, whole.  `in_place` as Wanted has it.  Throws
// StoreError if one is damaged (then they hold anything), and StorageError.  Precondition: inside the
// payload; offsets rise, and they do not overlap.  What no unit has is left as it was.
void read_payload(const Place& place, const SlotHeader& header, const Tables& tables,
                  const std::vector<Piece>& pieces, bool in_place = false);

// The units whose content is not what it was, in order; one that the storage cannot read (EIO) is among them.
std::vector<uint64_t> damaged_units(const Place& place, const SlotHeader& header, const Tables& tables);

// Whether the content of a slot with this header has been found whole: by slot, with the header's checksum.
using Judged = std::map<uint32_t, std::pair<uint64_t, bool>>;

// Registers what is whole, and newer than the superblock that `registry` comes from.  Answers a sentence
// about each.  `by_slot`: a header is newer if its slot's row says so (kNewerHeadersCount).  Else it must be
// newer than all, which is only asked where one superblock is lost and the other may be the older one.
std::string adopt_newer(const Place& place, Registry& registry, bool by_slot, Judged& judged);

}  // namespace understudy::persistence
