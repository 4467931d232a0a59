// What a store answers.
#include <algorithm>
#include <cstring>

#include "recovery/snapshots/csrc/store/store.h"

namespace understudy::persistence {
namespace {

void check_size(uint64_t sequence, uint64_t index, const Extent& extent, uint64_t bytes) {
  if (extent.bytes != bytes)
    throw StoreError("extent " + std::to_string(index) + " of snapshot " + std::to_string(sequence) +
                     " has " + std::to_string(extent.bytes) + " bytes, and the buffer " +
                     std::to_string(bytes));
}

}  // namespace

Registry Store::registry() const {
  const Call call(*this);
  return current_registry();
}

Registry Store::current_registry() const {
  if (slots_) return slots_->registry();
  // Another process may write at this moment: a superblock that is half written makes the other one count,
  // and if both seem so, then one was written between the looks.
  for (int left = 3;; left--) {
    try {
      StoreFacts facts = read_superblocks(*storage_, options_.exact);
      if (facts.block.uuid != like_.uuid || facts.geometry.store_bytes() != geometry_.store_bytes() ||
          facts.geometry.chunk_bytes != geometry_.chunk_bytes || facts.geometry.slots != geometry_.slots ||
          facts.geometry.extents_have_digests != geometry_.extents_have_digests)
        throw StoreError(name_ + " is not the store any more that was opened: open it again");
      adopt(facts);
      return facts.registry;
    } catch (const StoreError&) {
      if (left == 0) throw;
    }
  }
}

std::string Store::adopt(StoreFacts& facts) const {
  if (!facts.newer_headers_count && facts.note.empty()) return "";
  const std::lock_guard lock(judged_mutex_);
  return adopt_newer(place(), facts.registry, facts.newer_headers_count, judged_);
}

uint32_t Store::free_slots() const {
  const Call call(*this);
  if (slots_) return slots_->free_slots();
  const Registry now = current_registry();
  return static_cast<uint32_t>(
      std::count_if(now.slots.begin(), now.slots.end(), [](const Registered& r) { return r.sequence == 0; }));
}

std::vector<Entry> Store::snapshots() const {
  const Call call(*this);
  const Registry now = current_registry();
  std::vector<Entry> found;
  for (uint32_t slot = 0; slot < now.slots.size(); slot++) {
    const Registered r = now.slots[slot];
    if (r.sequence == 0) continue;
    std::optional<SlotHeader> header = read_header(place(), slot);
    if (header && (header->sequence != r.sequence || header->serial != r.serial)) header.reset();
    found.push_back({r, slot, std::move(header)});
  }
  std::sort(found.begin(), found.end(),
            [](const Entry& a, const Entry& b) { return is_newer(a.registered, b.registered); });
  return found;
}

Store::Snapshot Store::find(uint64_t sequence) const {
  const Registry now = current_registry();
  for (uint32_t slot = 0; slot < now.slots.size(); slot++) {
    if (sequence == 0 || now.slots[slot].sequence != sequence) continue;
    const std::optional<SlotHeader> header = read_header(place(), slot);
    if (!header || header->sequence != sequence || header->serial != now.slots[slot].serial)
      throw StoreError("snapshot " + std::to_string(sequence) + " of " + name_ + " is damaged: slot " +
                       std::to_string(slot) + " has no header of it");
    return {*header, read_tables(place(), *header)};
  }
  throw StoreError("there is no snapshot " + std::to_string(sequence) + " in " + name_);
}

std::vector<Extent> Store::extents(uint64_t sequence) const {
  const Call call(*this);
  return find(sequence).tables.extents;
}

void Store::read(uint64_t sequence, uint64_t extent, uint8_t* to, uint64_t bytes) const {
  const Call call(*this);
  const Snapshot snapshot = find(sequence);
  const std::vector<Extent>& extents = snapshot.tables.extents;
  if (extent >= extents.size())
    throw StoreError("snapshot " + std::to_string(sequence) + " has " + std::to_string(extents.size()) +
                     " extents, and none of index " + std::to_string(extent));
  const Extent& e = extents[extent];
  check_size(sequence, extent, e, bytes);
  read_payload(place(), snapshot.header, snapshot.tables, {{e.offset, to, bytes}});
}

void Store::read_all(uint64_t sequence, std::vector<Piece> into) const {
  const Call call(*this);
  const Snapshot snapshot = find(sequence);
  const std::vector<Extent>& extents = snapshot.tables.extents;
  if (into.size() != extents.size())
    throw StoreError("snapshot " + std::to_string(sequence) + " has " + std::to_string(extents.size()) +
                     " extents, not " + std::to_string(into.size()));
  for (size_t i = 0; i < into.size(); i++) {
    check_size(sequence, i, extents[i], into[i].bytes);
    into[i].offset = extents[i].offset;
  }
  read_payload(place(), snapshot.header, snapshot.tables, into);
}

void Store::read_into(uint64_t sequence, const std::vector<std::pair<uint64_t, uint64_t>>& extents,
                      uint8_t* area, uint64_t bytes, bool in_place) const {
  const Call call(*this);
  const Snapshot snapshot = find(sequence);
  std::vector<Piece> pieces;
  pieces.reserve(extents.size());
  for (const auto& [index, to] : extents) {
    if (index >= snapshot.tables.extents.size())
      throw StoreError("snapshot " + std::to_string(sequence) + " has no extent " + std::to_string(index));
    const Extent& e = snapshot.tables.extents[index];
    if (to > bytes || e.bytes > bytes - to)
      throw StoreError("extent " + std::to_string(index) + " does not fit the area at " + std::to_string(to));
    if (e.bytes != 0) pieces.push_back({e.offset, area + to, e.bytes});
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  read_payload(place(), snapshot.header, snapshot.tables, pieces, in_place);
}

std::vector<uint64_t> Store::digests(uint64_t sequence) const {
  const Call call(*this);
  std::vector<uint64_t> found;
  for (const Extent& e : find(sequence).tables.extents) found.push_back(e.digest);
  return found;
}

Store::Stream Store::stream(uint64_t sequence) const {
  const Call call(*this);
  return {find(sequence)};
}

void Store::read_on(Stream& stream, uint8_t* to, uint64_t bytes) const {
  const Call call(*this);
  const auto& [header, tables] = stream.snapshot;
  if (bytes > header.payload_bytes - stream.offset)
    throw StoreError("snapshot " + std::to_string(header.sequence) + " has " +
                     std::to_string(header.payload_bytes) + " bytes of payload, and no more");
  constexpr uint64_t kRequest = 4 << 20;
  if (!stream.memory) stream.memory = aligned_memory(kRequest);
  std::memset(to, 0, bytes);
  const uint64_t start = stream.offset;
  for (const uint64_t end = start + bytes; stream.offset < end;) {
    const uint64_t first = stream.offset / kBlock * kBlock;
    const uint64_t until = std::min(end, first + kRequest);
    storage_->read(geometry_.payload_offset(header.slot) + first, stream.memory.get(),
                   rounded_up(until, kBlock) - first);
    for (; stream.unit < tables.units.size(); stream.unit++) {
      const Unit& unit = tables.units[stream.unit];
      const uint64_t from = std::max(stream.offset, unit.offset);
      const uint64_t part_end = std::min(until, unit.offset + unit.bytes);
      if (from < part_end) {
        const uint8_t* const content = stream.memory.get() + (from - first);
        if (!std::exchange(stream.inside, true)) stream.digest.begin(unit);
        stream.digest.add(content, part_end - from);
        std::memcpy(to + (from - start), content, part_end - from);
      }
      if (unit.offset + unit.bytes > until) break;
      if (unit.bytes != 0 && stream.digest.value() != unit.digest)
        throw StoreError("snapshot " + std::to_string(header.sequence) + " of " + name_ +
                         " is damaged: " + tables.what(geometry_, stream.unit) +
                         " is not what it was when its digest was "
                         "taken, or the slot was written anew meanwhile");
      stream.inside = false;
    }
    stream.offset = until;
  }
}

std::vector<uint64_t> Store::verify(uint64_t sequence) const {
  const Call call(*this);
  const Snapshot snapshot = find(sequence);
  return damaged_units(place(), snapshot.header, snapshot.tables);
}

}  // namespace understudy::persistence
