// Copies that pass the processor's caches by, for persistent memory.
#pragma once
#include <cstdint>

namespace understudy::persistence {

enum class Stream { kSse2, kAvx512 };

// Whether this processor (and this build) has such stores.
bool can_stream(Stream stream);
// The widest that can_stream().  Precondition: there is one.
Stream best_stream();
// Non-temporal stores for whole cache lines; the ragged ends are written as usual and flushed out of the
// cache, since smaller non-temporal stores do not exist for every length.  No fence: see fence_stores().
void stream_copy(Stream stream, uint8_t* to, const uint8_t* from, uint64_t bytes);
// What this thread has stream-copied is in the persistence domain (and seen by others) after this.
void fence_stores();

}  // namespace understudy::persistence
