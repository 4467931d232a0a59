// The manifest of a commit: what was alive, and where its content can be had.
#pragma once
#include <string>
#include <vector>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

struct Manifest {
  uint64_t commit = 0;
  std::vector<ManifestBuffer> buffers;
  std::vector<ManifestGenerator> generators;
  std::vector<ManifestCommunicator> communicators;
  std::vector<ManifestSetting> settings;

  uint64_t encoded_bytes() const;
  void encode(uint8_t* to) const;  // encoded_bytes() bytes
  // Checks magic, counts, bounds of every reference into `area`, and the digest, all of a copy. `entry` must
  // be one too: not the row of the ring. Throws LogError.
  static Manifest read(const Area& area, const CommitEntry& entry);
};

}  // namespace understudy::replay
