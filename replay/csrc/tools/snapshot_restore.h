// Brings a snapshot that was kept elsewhere back into the `snapshot` area of a log, as a device server leaves
// one there. No server may be using the area meanwhile; the next one that attaches adopts it.
#pragma once
#include <vector>

#include "replay/csrc/tools/log_view.h"

namespace understudy::replay {

// Withdraws what is published, reserves memory, and answers where row and manifest of a stored snapshot want
// its contents. Throws LogError: they make no sense, the log does not reach back to it, no memory.
SnapshotContents make_room_for_snapshot(LogMap& log, CommitRow commit, const std::vector<uint8_t>& manifest);

// Its contents are there; throws LogError if they are not what the manifest says.  `checked`: handles of
// buffers that were found to be while they were read.
void publish_restored_snapshot(LogMap& log, uint64_t serial, const CommitRow& commit,
                               const std::vector<uint8_t>& manifest, const std::vector<uint64_t>& checked);

}  // namespace understudy::replay
