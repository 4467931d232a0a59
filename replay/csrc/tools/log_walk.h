// One pass over the records of a log that knows where the buffers come from which they name. The log may be a
// hostile worker's, and a living one's: what it lets go of meanwhile is passed over.
#pragma once
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "replay/csrc/log/log_reader.h"
#include "replay/csrc/tools/buffer_uses.h"
#include "replay/csrc/tools/log_view.h"

namespace understudy::replay {

struct Maker {
  uint64_t record;
  Kind kind;
  uint64_t aux;  // of an operator its template
};

struct NamedBuffer {
  BufferUse use;
  std::optional<Maker> maker;  // none: older than the log, or nobody knows any more (LogWalk::knows_all)
};

struct WalkedRecord {
  RecordView view;
  std::vector<NamedBuffer> buffers;
  uint64_t left_out = 0;                 // beyond LogWalk::kMostNamed
  std::optional<uint64_t> results_from;  // the first handle that was set aside for what may come of it
  bool makes_sense = true;               // else its template is gone or does not fit it
};

class LogWalk {
 public:
  static constexpr uint64_t kMostNamed = 128;       // by one record
  static constexpr size_t kMostMade = 4096;         // by one record
  static constexpr size_t kMostFollowed = 1 << 18;  // buffers that are alive
  static constexpr size_t kMostResults = 1 << 16;   // calls that were waited for

  // Over what the log holds now.
  explicit LogWalk(const LogMap& log);
  // The next record whose index is in [first, end); none: there are no more of them. Throws LogError at what
  // is no record.
  std::optional<WalkedRecord> next(uint64_t first, uint64_t end);
  // Goes on to the end: which record frees which of these.
  std::map<uint64_t, uint64_t> freed(const std::vector<uint64_t>& handles);
  // Of the first record that was met.
  std::optional<uint64_t> first_index() const { return first_index_; }
  // Whether a buffer without a maker is older than that one.
  bool knows_all() const { return knows_all_; }

 private:
  struct Met {
    LogReader::Entry entry;
    uint64_t offset;
  };
  struct Read {
    WalkedRecord record;
    std::vector<uint64_t> made;
  };
  bool was_freed(uint64_t offset) const;
  std::optional<Met> meet();
  Read read(const Met& met, bool wanted) const;
  void follow(Read& read, const Record& header);
  void remember(uint64_t handle, const Maker& maker);
  std::optional<Maker> maker_of(uint64_t handle) const;

  const LogMap& log_;
  LogReader reader_;
  uint64_t tail_, offset_ = 0;
  std::optional<uint64_t> first_index_;
  bool knows_all_ = true;
  std::unordered_map<uint64_t, Maker> makers_;
  std::map<uint64_t, Maker> results_;  // by the first of the handles that were set aside for them
};

}  // namespace understudy::replay
