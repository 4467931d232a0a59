// Handles of buffers: numbers that the worker gives, each once in a session.
#pragma once
#include <cstdint>

namespace understudy::replay {

// A worker sets so many aside for a call that it waits for, as it does not know yet what comes of it: those
// from the first one on that the record names. Results take as many of them as there are.
inline constexpr uint64_t kHandlesPerSyncCall = 1024;

}  // namespace understudy::replay
