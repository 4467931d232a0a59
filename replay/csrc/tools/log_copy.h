// A log as bytes: what storage gets of it, and how that becomes a log again (docs/stored-log.md).
#pragma once
#include <cstdint>
#include <vector>

#include "replay/csrc/log/log_map.h"
#include "replay/csrc/rewind/marks.h"

namespace understudy::replay {

// Records of [begin, end).  Throws LogError if they are not, or not any more, all there.
std::vector<uint8_t> copy_records(const LogMap& log, uint64_t begin, uint64_t end);
// The dictionary's bytes of [begin, end), whatever they are: what no record of the log names may have gone.
std::vector<uint8_t> copy_templates(const LogMap& log, uint64_t begin, uint64_t end);

// A commit, with what its place in the log does not say: the frees of the record behind it, where it has done
// them, and its manifest, where there is one.
struct CopiedCommit {
  CommitRow row;
  std::vector<uint64_t> frees;
  std::vector<uint8_t> manifest;
};
// Throws LogError if it is not in the ring any more.
CopiedCommit copy_commit(const LogMap& log, uint64_t number);

// Fills a log that nobody has used with what was copied of another one.
class LogFiller {
 public:
  // Both logs have segments of the same size.  Throws LogError, and so do all others.
  LogFiller(LogMap& log, uint64_t offset);
  void put_records(const uint8_t* bytes, uint64_t count);
  void put_templates(uint64_t id, const uint8_t* bytes, uint64_t count);
  // What follows is a record that frees what the commit there has freed, and does nothing else: a commit
  // takes effect at a record.  Only now there is something to be replayed; all values in it were delivered.
  void finish(const std::vector<uint64_t>& frees, uint64_t index);

 private:
  uint64_t end() const { return (first_segment_ + log_.segment_count()) * log_.segment_bytes(); }

  LogMap& log_;
  uint64_t first_segment_, tail_, dictionary_begin_ = ~0ull, dictionary_tail_ = 0;
};

}  // namespace understudy::replay
