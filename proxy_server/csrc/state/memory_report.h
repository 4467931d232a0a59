// Answers torch.cuda's questions about memory, for the device that is really used.
#pragma once
#include "proxy_server/csrc/state/device_state.h"

namespace understudy::server {

// Does what `query` asks for and reads the counters. Driver `cuda`: those of the server's caching allocator.
// Driver `cpu`, which has none: the program's buffers; `reserved` adds what is kept for recovery; free memory
// is what the host could still give.
replay::MemoryStatistics report_memory(replay::MemoryQuery query, DeviceState& state, const Driver& driver);

}  // namespace understudy::server
