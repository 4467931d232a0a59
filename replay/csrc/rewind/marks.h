// How far communicators had come at a commit: what has no place in its row, and rows with everything.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

using Marks = std::vector<CommunicatorMark>;

struct CommitRow : CommitEntry {
  Marks more;
};

// Puts the first in their place in the entry, whose count is that of all; answers the others.
Marks place_marks(CommitEntry& entry, const Marks& all);

// How many of `communicators` have no place elsewhere.
uint64_t further_marks(uint64_t communicators);
// A row of `marks`: those. What was read while somebody wrote it counts as little as the rest of what tells
// of them.
Marks read_more_marks(const LogMap& log, uint64_t row, uint64_t communicators);
// False if there is no memory for them, or they are too many.
bool write_more_marks(LogMap& log, uint64_t row, const Marks& marks);

// As storage has them, without the digest of the optimizer step.
std::vector<uint8_t> encode_row(const CommitRow& row);
// Throws LogError if it makes no sense.
CommitRow decode_row(std::string_view bytes);

// All that tells two commits apart, and no more: to compare them.
std::string encode_short_row(const CommitRow& row);
// Throws LogError if it makes no sense.
CommitRow decode_short_row(std::string_view bytes);

}  // namespace understudy::replay
