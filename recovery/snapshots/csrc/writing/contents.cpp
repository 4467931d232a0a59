#include "recovery/snapshots/csrc/writing/contents.h"

#include <algorithm>

namespace understudy::persistence {
namespace {

void check(const ContentArea& area, const AreaContent& row) {
  if (row.offset > area.bytes || row.bytes > area.bytes - row.offset)
    throw StoreError("content " + std::to_string(row.id) + " lies outside the snapshot area");
}

}  // namespace

Contents::Laid Contents::lay_out(const std::vector<LooseContent>& loose, const ContentArea& area,
                                 std::vector<AreaContent> rows) {
  Laid laid;
  laid.extents.reserve(loose.size() + rows.size());
  laid.pieces.reserve(loose.size() + rows.size());
  const auto add = [&](uint32_t kind, uint64_t id, const uint8_t* data, uint64_t bytes, uint64_t offset,
                       uint64_t digest) {
    laid.extents.push_back({kind, 0, id, bytes, offset, digest});
    laid.pieces.push_back({data, bytes, offset});
    laid.bytes = offset + bytes;
  };
  const auto add_loose = [&](uint32_t kind, uint64_t id, const uint8_t* data, uint64_t bytes,
                             uint64_t digest) {
    add(kind, id, data, bytes, rounded_up(laid.bytes, kExtentAlignment), digest);
  };
  for (const LooseContent& content : loose)
    add_loose(content.kind, content.id, content.data, content.bytes, content.digest);

  for (const AreaContent& row : rows) check(area, row);
  std::stable_sort(rows.begin(), rows.end(),
                   [](const AreaContent& a, const AreaContent& b) { return a.offset < b.offset; });
  struct Found {
    size_t first, last;
  };
  std::vector<Found> runs;
  for (size_t first = 0; first < rows.size();) {
    uint64_t end = rows[first].offset + rows[first].bytes;
    size_t last = first + 1;
    // Whoever let two overlap gets each of them by itself.
    while (last < rows.size() && rows[last].offset >= end && rows[last].offset - end < kBlock) {
      end = rows[last].offset + rows[last].bytes;
      last++;
    }
    // Of the last page all has to be there.
    if (end - rows[first].offset >= area.shortest_run && rounded_up(end, kBlock) <= area.bytes)
      runs.push_back({first, last});
    else
      for (size_t i = first; i < last; i++)
        add_loose(rows[i].kind, rows[i].id, area.data + rows[i].offset, rows[i].bytes, rows[i].digest);
    first = last;
  }
  for (const auto& [first, last] : runs) {
    const uint64_t begin = rows[first].offset / kBlock * kBlock;
    const uint64_t base = rounded_up(laid.bytes, kBlock);
    for (size_t i = first; i < last; i++)
      add(rows[i].kind, rows[i].id, area.data + rows[i].offset, rows[i].bytes,
          base + (rows[i].offset - begin), rows[i].digest);
    laid.bytes = rounded_up(laid.bytes, kBlock);
    laid.runs.push_back({base, area.data + begin, laid.bytes - base});
  }
  return laid;
}

Contents::Contents(const std::vector<LooseContent>& loose, const ContentArea& area,
                   std::vector<AreaContent> rows)
    : Contents(lay_out(loose, area, std::move(rows)), area.in_place) {}

Contents::Contents(Laid laid, bool in_place)
    : GatherSource(std::move(laid.pieces)), laid_(std::move(laid)), in_place_(in_place) {
  set_bytes(laid_.bytes);
}

Source::Span Contents::span(uint64_t offset) const {
  const auto next = std::upper_bound(laid_.runs.begin(), laid_.runs.end(), offset,
                                     [](uint64_t at, const Run& run) { return at < run.offset + run.bytes; });
  if (!in_place_ || next == laid_.runs.end()) return {nullptr, bytes() - offset};
  if (offset < next->offset) return {nullptr, next->offset - offset};
  return {next->data + (offset - next->offset), next->offset + next->bytes - offset};
}

}  // namespace understudy::persistence
