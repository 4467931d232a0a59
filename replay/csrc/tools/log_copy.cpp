#include "replay/csrc/tools/log_copy.h"

#include <algorithm>
#include <cstring>

#include "replay/csrc/rewind/manifest.h"
#include "replay/csrc/tools/log_view.h"

namespace understudy::replay {
namespace {

constexpr uint64_t kMostFrees = 0xffff;  // Record::frees

bool is_kept(const LogMap& log, uint64_t offset) {
  return log.page().server().freed_segments.load(std::memory_order_acquire) <= offset / log.segment_bytes();
}

void check_kept(const LogMap& log, uint64_t offset) {
  if (!is_kept(log, offset)) throw LogError("the log before was let go of");
}

// Piece by piece, none across the end of a unit: begin of each, and its length.
template <class See>
void for_each_piece(uint64_t begin, uint64_t end, uint64_t unit, See&& see) {
  while (begin < end) {
    const uint64_t count = std::min(end - begin, unit - begin % unit);
    see(begin, count);
    begin += count;
  }
}

}  // namespace

std::vector<uint8_t> copy_records(const LogMap& log, uint64_t begin, uint64_t end) {
  if (begin > end || end > log.page().worker().tail.load(std::memory_order_acquire) ||
      end - begin > log.segment_bytes() * log.segment_count())
    throw LogError("there are no such records in the log");
  check_kept(log, begin);
  std::vector<uint8_t> bytes(end - begin);
  for_each_piece(begin, end, log.segment_bytes(), [&](uint64_t at, uint64_t count) {
    std::memcpy(bytes.data() + (at - begin), log.at(at), count);
  });
  std::atomic_thread_fence(std::memory_order_seq_cst);
  check_kept(log, begin);  // else its segments may have been used again meanwhile
  return bytes;
}

std::vector<uint8_t> copy_templates(const LogMap& log, uint64_t begin, uint64_t end) {
  if (begin > end || end > log.page().worker().dictionary_tail.load(std::memory_order_acquire) ||
      end - begin > log.dictionary_bytes())
    throw LogError("there are no such templates in the log");
  std::vector<uint8_t> bytes(end - begin);
  for_each_piece(begin, end, log.dictionary_bytes(), [&](uint64_t at, uint64_t count) {
    std::memcpy(bytes.data() + (at - begin), log.template_at(at), count);
  });
  return bytes;
}

CopiedCommit copy_commit(const LogMap& log, uint64_t number) {
  CopiedCommit found{commit_row(log, number), {}, {}};
  const uint64_t offset = found.row.log_offset;
  check_kept(log, offset);
  if ((found.row.flags & kCommitFreesApplied) != 0) {
    const Record r = log.record(offset, log.page().worker().tail.load(std::memory_order_acquire));
    found.frees.resize(r.frees);
    std::memcpy(found.frees.data(), log.at(offset) + sizeof(Record), 8ull * r.frees);
  }
  if (found.row.manifest_bytes != 0) try {
      const Manifest manifest = Manifest::read(log.shadows(), found.row);
      found.manifest.resize(manifest.encoded_bytes());
      manifest.encode(found.manifest.data());
    } catch (const LogError&) {  // the server has used its place again
      found.manifest.clear();
    }
  if (commit_entry(log, number).log_offset != offset) throw LogError("another commit took its place");
  check_kept(log, offset);
  return found;
}

LogFiller::LogFiller(LogMap& log, uint64_t offset)
    : log_(log), first_segment_(offset / log.segment_bytes()), tail_(offset) {
  const MakerPage page = log.maker_page();
  if (page.worker().tail.load() != 0 || page.server().commit_count.load() != 0)
    throw LogError("this log is in use");
  if (offset % kAlign != 0 || first_segment_ > (1ull << 48)) throw LogError("no log begins there");
  for (uint64_t i = 0; i < log.segment_count(); i++)
    page.segments().of[(first_segment_ + i) % log.segment_count()] = static_cast<uint32_t>(i);
  page.server().freed_segments.store(first_segment_);
  // What lies before in the segment was not copied; for who reads a log from there on it is one record.
  const uint64_t before = offset % log.segment_bytes();
  if (before == 0) return;
  if (before < sizeof(Record)) throw LogError("no record ends there");
  if (!reserve_memory(log.at(offset - before), sizeof(Record)))
    throw LogError("there is no memory in /dev/shm");
  const Record pad{static_cast<uint32_t>(before), static_cast<uint16_t>(Kind::kPad), 0, 0, 0};
  std::memcpy(log.at(offset - before), &pad, sizeof pad);
}

void LogFiller::put_records(const uint8_t* bytes, uint64_t count) {
  if (count > end() - tail_) throw LogError("the stored log is larger than a log can be");
  for_each_piece(tail_, tail_ + count, log_.segment_bytes(), [&](uint64_t at, uint64_t piece) {
    uint8_t* const to = log_.at(at);
    if (!reserve_memory(to, piece)) throw LogError("there is no memory for the stored log in /dev/shm");
    std::memcpy(to, bytes + (at - tail_), piece);
  });
  tail_ += count;
}

void LogFiller::put_templates(uint64_t id, const uint8_t* bytes, uint64_t count) {
  const uint64_t begin = std::min(dictionary_begin_, id);
  if (id % kAlign != 0 || count > ~0ull - id ||
      std::max(dictionary_tail_, id + count) - begin > log_.dictionary_bytes())
    throw LogError("the stored templates are more than a dictionary holds");
  for_each_piece(id, id + count, log_.dictionary_bytes(), [&](uint64_t at, uint64_t piece) {
    uint8_t* const to = log_.template_at(at);
    if (!reserve_memory(to, piece)) throw LogError("there is no memory for the stored log in /dev/shm");
    std::memcpy(to, bytes + (at - id), piece);
  });
  dictionary_begin_ = begin;
  dictionary_tail_ = std::max(dictionary_tail_, id + count);
}

void LogFiller::finish(const std::vector<uint64_t>& frees, uint64_t index) {
  const uint64_t bytes = sizeof(Record) + 8 * frees.size();
  if (frees.size() > kMostFrees || bytes > log_.segment_bytes() - tail_ % log_.segment_bytes() ||
      bytes > end() - tail_)
    throw LogError("the frees of a stored commit make no sense");
  uint8_t* const to = log_.at(tail_);
  if (!reserve_memory(to, bytes)) throw LogError("there is no memory for the stored log in /dev/shm");
  const Record last{static_cast<uint32_t>(bytes), static_cast<uint16_t>(Kind::kPhase),
                    static_cast<uint16_t>(frees.size()), index,
                    static_cast<uint64_t>(Phase::kForwardBackward)};
  std::memcpy(to, &last, sizeof last);
  if (!frees.empty()) std::memcpy(to + sizeof last, frees.data(), 8 * frees.size());
  const MakerPage page = log_.maker_page();
  if (dictionary_tail_ != 0) {
    page.worker().dictionary_begin.store(dictionary_begin_);
    page.worker().dictionary_tail.store(dictionary_tail_);
  }
  page.server().reply_sequence.store(~0ull);
  page.worker().tail_index.store(index + 1);
  page.worker().tail.store(tail_ + bytes);
}

}  // namespace understudy::replay
