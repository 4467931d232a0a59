#include "recovery/persistence/csrc/snapshot_reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace understudy::persistence {
namespace {

constexpr uint64_t kReaders = 4;  // threads, at most; more than cores, since each waits for the storage

std::string called(const Place& place, const SlotHeader& header) {
  return "snapshot " + std::to_string(header.sequence) + " of " + place.storage.name();
}

uint64_t bytes_of(const SlotHeader& header, uint64_t chunk) {
  return std::min(header.chunk_bytes, header.payload_bytes - chunk * header.chunk_bytes);
}

// Calls visit(chunk, content or null if it is damaged) for [first, last), in several threads and in any
// order.
template <class Visit>
void for_each_chunk(const Place& place, const SlotHeader& header, const Tables& tables, uint64_t first,
                    uint64_t last, Visit&& visit) {
  std::atomic<uint64_t> next{first};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto read_some = [&] {
    try {
      const AlignedMemory memory = aligned_memory(std::min(header.chunk_bytes, header.payload_bytes));
      for (uint64_t chunk; (chunk = next.fetch_add(1)) < last;) {
        const uint64_t bytes = bytes_of(header, chunk);
        bool right = true;
        try {
          place.storage.read(place.geometry.payload_offset(header.slot) + chunk * header.chunk_bytes,
                             memory.get(), rounded_up(bytes, kBlock));
        } catch (const StorageError& e) {
          if (e.code().value() != EIO) throw;
          right = false;
        }
        right = right && replay::digest(memory.get(), bytes) == tables.digests[chunk];
        visit(chunk, right ? memory.get() : nullptr);
      }
    } catch (...) {
      next.store(last);
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    const uint64_t readers = std::min(kReaders, last - first);
    for (uint64_t i = 1; i < readers; i++) {
      try {
        others.emplace_back(read_some);
      } catch (const std::system_error&) {
        break;  // no more threads to be had
      }
    }
    read_some();
  }
  if (failure) std::rethrow_exception(failure);
}

// Copies what a chunk, which begins at `begin` of the payload, has of the pieces.
void scatter(const uint8_t* content, uint64_t begin, uint64_t bytes, const std::vector<Piece>& pieces) {
  const uint64_t end = begin + bytes;
  auto piece = std::upper_bound(pieces.begin(), pieces.end(), begin,
                                [](uint64_t at, const Piece& p) { return at < p.offset + p.bytes; });
  for (; piece != pieces.end() && piece->offset < end; ++piece) {
    const uint64_t from = std::max(begin, piece->offset);
    const uint64_t until = std::min(end, piece->offset + piece->bytes);
    if (from < until) std::memcpy(piece->to + (from - piece->offset), content + (from - begin), until - from);
  }
}

// Both counts are bounded before anything is multiplied with them.
bool fits(const Geometry& geometry, const SlotHeader& h) {
  return h.chunk_bytes == geometry.chunk_bytes && h.payload_bytes <= geometry.slot_bytes &&
         h.extents <= kMostExtents && h.chunks == parts_of(h.payload_bytes, h.chunk_bytes) &&
         room_for(h.payload_bytes, h.extents, h.chunk_bytes) <= geometry.slot_bytes;
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
  const uint64_t bytes = tables_bytes(header.extents, header.chunks);
  Tables tables;
  if (bytes == 0) return tables;
  const AlignedMemory memory = aligned_memory(bytes);
  place.storage.read(place.geometry.payload_offset(header.slot) + rounded_up(header.payload_bytes, kBlock),
                     memory.get(), rounded_up(bytes, kBlock));
  if (replay::digest(memory.get(), bytes) != header.tables_digest)
    throw StoreError(called(place, header) + " is damaged: its tables are not what they were");
  tables.extents.resize(header.extents);
  tables.digests.resize(header.chunks);
  const uint64_t of_extents = header.extents * sizeof(Extent);
  if (of_extents != 0) std::memcpy(tables.extents.data(), memory.get(), of_extents);
  if (bytes != of_extents) std::memcpy(tables.digests.data(), memory.get() + of_extents, bytes - of_extents);
  uint64_t end = 0;
  for (const Extent& e : tables.extents) {
    if (e.offset < end || e.offset > header.payload_bytes || e.bytes > header.payload_bytes - e.offset)
      throw StoreError(called(place, header) + " is damaged: an extent lies outside its payload");
    end = e.offset + e.bytes;
  }
  return tables;
}

void read_payload(const Place& place, const SlotHeader& header, const Tables& tables,
                  const std::vector<Piece>& pieces) {
  uint64_t first = UINT64_MAX, last = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    first = std::min(first, piece.offset / header.chunk_bytes);
    last = parts_of(piece.offset + piece.bytes, header.chunk_bytes);
  }
  if (last == 0) return;
  for_each_chunk(place, header, tables, first, last, [&](uint64_t chunk, const uint8_t* content) {
    if (content == nullptr)
      throw StoreError(called(place, header) + " is damaged: chunk " + std::to_string(chunk) +
                       " is not what it was, or the slot was written anew meanwhile");
    scatter(content, chunk * header.chunk_bytes, bytes_of(header, chunk), pieces);
  });
}

std::vector<uint64_t> damaged_chunks(const Place& place, const SlotHeader& header, const Tables& tables) {
  std::mutex mutex;
  std::vector<uint64_t> damaged;
  if (header.chunks == 0) return damaged;
  for_each_chunk(place, header, tables, 0, header.chunks, [&](uint64_t chunk, const uint8_t* content) {
    if (content != nullptr) return;
    const std::lock_guard lock(mutex);
    damaged.push_back(chunk);
  });
  std::sort(damaged.begin(), damaged.end());
  return damaged;
}

namespace {

bool is_whole(const Place& place, const SlotHeader& header) {
  try {
    return damaged_chunks(place, header, read_tables(place, header)).empty();
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
