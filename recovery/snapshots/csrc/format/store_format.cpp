#include "recovery/snapshots/csrc/format/store_format.h"

namespace understudy::persistence {

std::string Geometry::wrong() const {
  if (slots < kFewestSlots || slots > kMostSlots)
    return "a store has " + std::to_string(kFewestSlots) + " to " + std::to_string(kMostSlots) +
           " slots, not " + std::to_string(slots);
  if (chunk_bytes < kBlock || chunk_bytes > kMostChunkBytes || chunk_bytes % kBlock != 0)
    return "chunks have 4096 bytes to 256 MiB, in multiples of 4096, not " + std::to_string(chunk_bytes);
  if (slot_bytes < kBlock || slot_bytes % kBlock != 0 || slot_bytes > (1ull << 60) / kMostSlots)
    return "slots have at least 4096 bytes, in multiples of 4096, and a store less than an exbibyte, not "
           "slots of " +
           std::to_string(slot_bytes);
  if (parts_of(slot_bytes, chunk_bytes) > kMostChunks)
    return "a slot of " + std::to_string(slot_bytes) + " bytes would have more than 2^24 chunks of " +
           std::to_string(chunk_bytes) + ": choose larger chunks";
  return "";
}

}  // namespace understudy::persistence
