// The device server's end of the log: the header of the record at an offset, read once and checked.
//
// The worker could change a record while it is read, so whoever acts on a header acts on this copy.
#pragma once
#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

class LogReader {
 public:
  explicit LogReader(const LogMap& map) : map_(map) {}

  struct Entry {
    Record header;
    uint64_t* body;  // behind the header: the handles to free, then what the kind says
  };

  // Throws LogError.
  Entry read(uint64_t offset, uint64_t tail) {
    if (__builtin_expect(offset < begin_ || offset >= end_, 0)) enter(offset);
    auto* const record = reinterpret_cast<Record*>(base_ + (offset - begin_));
    if (__builtin_expect(offset % kAlign != 0 || offset >= tail || end_ - offset < sizeof(Record), 0))
      refuse(offset, tail);
    const Entry entry{copy_once(*record), record->body()};
    const Record& r = entry.header;
    if (__builtin_expect(r.bytes < sizeof(Record) || r.bytes % kAlign != 0 || r.bytes > end_ - offset ||
                             r.bytes > tail - offset || r.kind >= kKinds ||
                             sizeof(Record) + 8ull * r.frees > r.bytes,
                         0))
      refuse(offset, tail);
    return entry;
  }

 private:
  void enter(uint64_t offset) {
    begin_ = offset / map_.segment_bytes() * map_.segment_bytes();
    end_ = begin_ + map_.segment_bytes();
    base_ = map_.at(begin_);
  }
  // Says what is wrong with it.
  [[noreturn]] void refuse(uint64_t offset, uint64_t tail) const {
    (void)map_.record(offset, tail);
    throw LogError("the record at offset " + std::to_string(offset) + " changed while it was read");
  }

  const LogMap& map_;
  uint64_t begin_ = 0, end_ = 0;  // of the segment that was read last
  uint8_t* base_ = nullptr;
};

}  // namespace understudy::replay
