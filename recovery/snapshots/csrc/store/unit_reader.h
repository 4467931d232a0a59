// Reads units, each of which has one digest: many requests at a time, and each unit's bytes are digested as
// they come, while they are in the caches.
#pragma once
#include <cstdint>
#include <functional>
#include <variant>
#include <vector>

#include "recovery/snapshots/csrc/storage/storage.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::persistence {

// A chunk of the payload, or an extent.
struct Unit {
  uint64_t offset;  // within the payload
  uint64_t bytes;
  uint64_t digest;
  bool tree;  // ContentDigest, of an extent; else XXH3-64 of the whole
};

// Of a unit, as its bytes come.
class UnitDigest {
 public:
  void begin(const Unit& unit) {
    if (unit.tree)
      digest_.emplace<replay::ContentDigest>();
    else
      digest_.emplace<replay::StreamedDigest>();
  }
  void add(const uint8_t* content, uint64_t bytes) {
    std::visit([&](auto& digest) { digest.add(content, bytes); }, digest_);
  }
  uint64_t value() const {
    return std::visit([](const auto& digest) { return digest.value(); }, digest_);
  }

 private:
  std::variant<replay::StreamedDigest, replay::ContentDigest> digest_;
};

// Where a part of the payload is to go.
struct Piece {
  uint64_t offset;
  uint8_t* to;
  uint64_t bytes;
};

struct Wanted {
  const std::vector<Unit>& units;    // offsets rise, and they do not overlap
  const std::vector<Piece>& pieces;  // likewise
  // Whether to read to where pieces are, without a copy.  Then memory between pieces that lie apart as their
  // parts of the payload do is overwritten as well.
  bool in_place = false;
};

// `begin`: where the payload lies.  Fills the pieces; `tell` hears of each unit, from any thread and in any
// order, whether its content is what its digest is of.  Where it is not, the pieces hold anything.  Throws
// StorageError, and what `tell` throws.
void read_units(const Storage& storage, uint64_t begin, const Wanted& wanted,
                const std::function<void(size_t unit, bool right)>& tell);

}  // namespace understudy::persistence
