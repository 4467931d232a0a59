// A rank's control page as its job's coordinator sees it from another host: what worker and device server
// write goes there, what proxyd writes comes back.  Either may be hostile.
#pragma once
#include <string_view>
#include <vector>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

// What worker and device server have written: a copy that holds every commit that it counts, and behind that
// what the control page has no place for (marks.h).
std::vector<uint8_t> control_state(const LogMap& log);
// Lays it out in a mirror; times of the other host's CLOCK_MONOTONIC are moved by `clock_offset_ns`. Throws
// LogError if it is none.
void apply_control_state(LogMap& mirror, std::string_view state, int64_t clock_offset_ns);

// What proxyd has written.
std::vector<uint8_t> control_orders(const LogMap& mirror);
// A loss is told, drills are added and done; neither is ever taken back. Throws LogError.
void apply_control_orders(LogMap& log, std::string_view orders);

struct Place {
  uint64_t offset, bytes;
};
// Where the manifest of a commit in the ring lies in the shadow area; of no bytes if it has none. Throws
// LogError.
Place manifest_place(const LogMap& log, uint64_t commit);
// Bytes of the shadow area; throws LogError if they lie outside of it.
std::vector<uint8_t> copy_shadow(const LogMap& log, uint64_t offset, uint64_t bytes);
void put_shadow(LogMap& mirror, uint64_t offset, std::string_view content);

void lose_session(LogMap& log, const std::string& message);

}  // namespace understudy::replay
