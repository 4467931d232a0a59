// Writes a payload: some threads, each of which fills a chunk while the storage writes those before it.
#pragma once
#include <vector>

#include "recovery/persistence/csrc/chunk_pool.h"
#include "recovery/persistence/csrc/source.h"
#include "recovery/persistence/csrc/storage.h"

namespace understudy::persistence {

struct Written {
  std::vector<uint64_t> digests;  // of each chunk
  double stalled_seconds = 0;     // the longest that a thread waited for a chunk of the pool
};

// Writes `source` at `offset`, in chunks, with `threads` threads; the caller is one of them and writes with
// `own`. All writes have ended when this returns or throws, and all chunks are back in the pool; nothing is
// synced. Throws the first thing that went wrong (StorageError, or what the source threw).
Written write_payload(Storage& storage, std::unique_ptr<Writer>& own, ChunkPool& pool, const Source& source,
                      uint64_t offset, uint64_t chunk_bytes, uint32_t threads);

}  // namespace understudy::persistence
