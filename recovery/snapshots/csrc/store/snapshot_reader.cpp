#include "recovery/snapshots/csrc/store/snapshot_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace understudy::persistence {
namespace {

std::string called(const Place& place, const SlotHeader& header) {
  return "snapshot " + std::to_string(header.sequence) + " of " + place.storage.name();
}

std::vector<Unit> chunks_of(const SlotHeader& header, const std::vector<uint64_t>& digests) {
  std::vector<Unit> units;
  units.reserve(digests.size());
  for (uint64_t begin = 0; const uint64_t digest : digests) {
    units.push_back({begin, std::min(header.chunk_bytes, header.payload_bytes - begin), digest, false});
    begin += header.chunk_bytes;
  }
  return units;
}

// Both counts are bounded before anything is multiplied with them.
bool fits(const Geometry& geometry, const SlotHeader& h) {
  return h.chunk_bytes == geometry.chunk_bytes && h.payload_bytes <= geometry.slot_bytes &&
         h.extents <= kMostExtents && h.chunks == geometry.chunks(h.payload_bytes) &&
         geometry.room_for(h.payload_bytes, h.extents) <= geometry.slot_bytes;
}

}  // namespace

std::optional<SlotHeader> read_header(const Place& place, uint32_t slot) {
  const AlignedMemory memory = aligned_memory(kBlock);
  try {
    place.storage.read(place.geometry.header_offset(slot), memory.get(), kBlock);
  } catch (const StorageError& e) {
    if (e.code().value() != EIO) throw;
    return std::nullopt;  // a bad sector
  }
  SlotHeader h;
  std::memcpy(&h, memory.get(), sizeof h);
  if (h.magic != kSlotMagic || h.version != kStoreVersion || h.checksum != checksum_of(h) || h.slot != slot ||
      h.uuid != place.uuid || h.sequence == 0 || h.sequence > kMostCounted || h.job_bytes > kMostJobBytes ||
      h.rank >= h.world || !fits(place.geometry, h))
    return std::nullopt;
  return h;
}

Tables read_tables(const Place& place, const SlotHeader& header) {
  const uint64_t row = place.geometry.row_bytes();
  const uint64_t bytes = place.geometry.tables_bytes(header.extents, header.payload_bytes);
  Tables tables;
  if (bytes == 0) return tables;
  const AlignedMemory memory = aligned_memory(bytes);
  place.storage.read(place.geometry.payload_offset(header.slot) + rounded_up(header.payload_bytes, kBlock),
                     memory.get(), rounded_up(bytes, kBlock));
  if (replay::digest(memory.get(), bytes) != header.tables_digest)
    throw StoreError(called(place, header) + " is damaged: its tables are not what they were");
  tables.extents.resize(header.extents);
  for (uint64_t i = 0; i < header.extents; i++) std::memcpy(&tables.extents[i], memory.get() + i * row, row);
  std::vector<uint64_t> digests(header.chunks);
  if (!digests.empty())
    std::memcpy(digests.data(), memory.get() + header.extents * row, digests.size() * sizeof(uint64_t));
  uint64_t end = 0;
  for (const Extent& e : tables.extents) {
    if (e.offset < end || e.offset > header.payload_bytes || e.bytes > header.payload_bytes - e.offset)
      throw StoreError(called(place, header) + " is damaged: an extent lies outside its payload");
    end = e.offset + e.bytes;
  }
  if (!place.geometry.extents_have_digests) {
    tables.units = chunks_of(header, digests);
    return tables;
  }
  tables.units.reserve(tables.extents.size());
  for (const Extent& e : tables.extents) tables.units.push_back({e.offset, e.bytes, e.digest, true});
  return tables;
}

std::string Tables::what(const Geometry& geometry, size_t unit) const {
  if (!geometry.extents_have_digests) return "chunk " + std::to_string(unit);
  const Extent& e = extents[unit];
  return "extent " + std::to_string(unit) + " (kind " + std::to_string(e.kind) + ", id " +
         std::to_string(e.id) + ")";
}

void read_payload(const Place& place, const SlotHeader& header, const Tables& tables,
                  const std::vector<Piece>& pieces, bool in_place) {
  std::vector<Unit> touched;
  std::vector<size_t> numbers;
  auto piece = pieces.begin();
  for (size_t unit = 0; unit < tables.units.size(); unit++) {
    const Unit& u = tables.units[unit];
    while (piece != pieces.end() && piece->offset + piece->bytes <= u.offset) ++piece;
    if (piece == pieces.end()) break;
    auto any = piece;
    while (any != pieces.end() && any->bytes == 0) ++any;
    if (any == pieces.end() || any->offset >= u.offset + u.bytes) continue;
    touched.push_back(u);
    numbers.push_back(unit);
  }
  read_units(place.storage, place.geometry.payload_offset(header.slot), {touched, pieces, in_place},
             [&](size_t unit, bool right) {
               if (right) return;
               throw StoreError(called(place, header) +
                                " is damaged: " + tables.what(place.geometry, numbers[unit]) +
                                " is not what it was when its digest was taken, or the slot was written anew "
                                "meanwhile");
             });
}

std::vector<uint64_t> damaged_units(const Place& place, const SlotHeader& header, const Tables& tables) {
  std::mutex mutex;
  std::vector<uint64_t> damaged;
  read_units(place.storage, place.geometry.payload_offset(header.slot), {tables.units, {}},
             [&](size_t unit, bool right) {
               if (right) return;
               const std::lock_guard lock(mutex);
               damaged.push_back(unit);
             });
  std::sort(damaged.begin(), damaged.end());
  return damaged;
}

namespace {

bool is_whole(const Place& place, const SlotHeader& header) {
  try {
    return damaged_units(place, header, read_tables(place, header)).empty();
  } catch (const StoreError&) {
    return false;
  } catch (const StorageError&) {
    return false;
  }
}

}  // namespace

std::string adopt_newer(const Place& place, Registry& registry, bool by_slot, Judged& judged) {
  std::string note;
  const uint64_t newest = registry.latest_sequence;
  for (uint32_t slot = 0; slot < registry.slots.size(); slot++) {
    if (registry.slots[slot].sequence != 0) continue;
    const std::optional<SlotHeader> header = read_header(place, slot);
    const uint64_t known = by_slot ? registry.slots[slot].serial : newest;
    if (!header || header->sequence <= known || header->serial < registry.floor) continue;
    auto& [checksum, whole] = judged[slot];
    if (checksum != header->checksum) {
      whole = is_whole(place, *header);
      checksum = header->checksum;
    }
    if (!whole) continue;
    registry.slots[slot] = {header->sequence, header->serial};
    if (header->sequence > registry.latest_sequence) {
      registry.latest_sequence = header->sequence;
      registry.latest_slot = slot;
    }
    note += ". Snapshot " + std::to_string(header->sequence) + " was found whole without it";
  }
  return note;
}

}  // namespace understudy::persistence
