// What a snapshot consists of, and where each part of it goes: loose contents, one behind the other, and then
// runs of an area, page by page as they lie there, so that they can be written from where they are.
//
//   area      ··[ a | b ]···[ c ]·····[ d |··[ e ]··     blocks of this snapshot, and of others
//   payload   loose, e | ·[ a | b ]··  | ·[ c ]··  | ·[ d |··
//
// What lies between the extents of a run is written with them and means nothing.
#pragma once
#include <cstdint>
#include <vector>

#include "recovery/snapshots/csrc/format/store_format.h"
#include "recovery/snapshots/csrc/writing/source.h"

namespace understudy::persistence {

struct LooseContent {
  uint32_t kind;
  uint64_t id;
  const uint8_t* data;
  uint64_t bytes;
  uint64_t digest = 0;  // 0: not known
};

// A content in the area.
struct AreaContent {
  uint32_t kind;
  uint64_t id;
  uint64_t offset, bytes;
  uint64_t digest;  // 0: not known
};

// Memory that somebody else writes, too: only addresses are derived from what it holds.
struct ContentArea {
  const uint8_t* data = nullptr;  // begins a page
  uint64_t bytes = 0;
  bool in_place = false;  // whether to write from it rather than a copy
  // A run of fewer bytes is not worth a request and up to two pages of padding: it is copied.
  uint64_t shortest_run = 64 << 10;
};

// The extents laid out, in the order of their offsets, and a source that has them.
class Contents : public GatherSource {
 public:
  // Throws StoreError: something lies outside the area.
  Contents(const std::vector<LooseContent>& loose, const ContentArea& area, std::vector<AreaContent> rows);

  const std::vector<Extent>& extents() const { return laid_.extents; }
  Span span(uint64_t offset) const override;

 private:
  struct Run {
    uint64_t offset;  // in the payload; a multiple of kBlock, as are the others
    const uint8_t* data;
    uint64_t bytes;
  };
  struct Laid {
    std::vector<Extent> extents;
    std::vector<Piece> pieces;
    std::vector<Run> runs;
    uint64_t bytes = 0;
  };
  static Laid lay_out(const std::vector<LooseContent>& loose, const ContentArea& area,
                      std::vector<AreaContent> rows);
  explicit Contents(Laid laid, bool in_place);

  Laid laid_;
  bool in_place_;
};

}  // namespace understudy::persistence
