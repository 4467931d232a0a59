// Writes a payload: some threads, each of which hands the storage what may be written from where it lies, and
// fills a chunk with the rest while the storage writes those before it.
#pragma once
#include <vector>

#include "recovery/snapshots/csrc/slots/chunk_pool.h"
#include "recovery/snapshots/csrc/storage/storage.h"
#include "recovery/snapshots/csrc/writing/source.h"

namespace understudy::persistence {

struct Written {
  std::vector<uint64_t> digests;  // of each chunk, if they were asked for
  double stalled_seconds = 0;     // the longest that a thread waited for a chunk of the pool
};

struct Block {
  uint64_t offset;
  const uint8_t* data;
  uint64_t bytes;
};

struct Payload {
  const Source& source;
  uint64_t offset;  // where it is to lie
  uint64_t chunk_bytes;
  bool digests;             // of each chunk; then all of it is copied
  std::vector<Block> also;  // written beside it
};

// Writes a payload, in chunks, with `threads` threads; the caller is one of them and writes with `own`. All
// writes have ended when this returns or throws, and all chunks are back in the pool; nothing is synced.
// Throws the first thing that went wrong (StorageError, or what the source threw).
Written write_payload(Storage& storage, std::unique_ptr<Writer>& own, ChunkPool& pool, const Payload& payload,
                      uint32_t threads);

}  // namespace understudy::persistence
