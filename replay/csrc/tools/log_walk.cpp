#include "replay/csrc/tools/log_walk.h"

#include <iterator>
#include <unordered_set>

#include "replay/csrc/log/handles.h"

namespace understudy::replay {

using How = BufferUse::How;

LogWalk::LogWalk(const LogMap& log)
    : log_(log), reader_(log), tail_(log.page().worker().tail.load(std::memory_order_acquire)) {}

// Then other records may lie there.
bool LogWalk::was_freed(uint64_t offset) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return log_.page().server().freed_segments.load(std::memory_order_acquire) > offset / log_.segment_bytes();
}

// None at the end.
std::optional<LogWalk::Met> LogWalk::meet() {
  while (true) {
    if (was_freed(offset_)) {
      if (first_index_) knows_all_ = false;
      const uint64_t freed = log_.page().server().freed_segments.load(std::memory_order_acquire);
      if (freed > tail_ / log_.segment_bytes()) return std::nullopt;
      offset_ = freed * log_.segment_bytes();
    }
    if (offset_ >= tail_) return std::nullopt;
    if (tail_ - offset_ > log_.segment_count() * log_.segment_bytes())
      throw LogError("the log claims to hold more than it has room for");
    try {
      const Met met{reader_.read(offset_, tail_), offset_};
      if (was_freed(met.offset)) continue;
      offset_ += met.entry.header.bytes;
      if (static_cast<Kind>(met.entry.header.kind) == Kind::kPad) continue;
      if (!first_index_) first_index_ = met.entry.header.index;
      return met;
    } catch (const LogError&) {
      if (!was_freed(offset_)) throw;
    }
  }
}

std::optional<WalkedRecord> LogWalk::next(uint64_t first, uint64_t end) {
  while (const std::optional<Met> met = meet()) {
    const Record& header = met->entry.header;
    if (header.index >= end) {
      offset_ = met->offset;  // freed() goes on with it
      return std::nullopt;
    }
    const bool wanted = header.index >= first;
    Read found = read(*met, wanted);
    if (was_freed(met->offset)) continue;
    follow(found, header);
    if (wanted) return std::move(found.record);
  }
  return std::nullopt;
}

std::map<uint64_t, uint64_t> LogWalk::freed(const std::vector<uint64_t>& handles) {
  std::unordered_set<uint64_t> wanted(handles.begin(), handles.end());
  std::map<uint64_t, uint64_t> found;
  while (!wanted.empty()) {
    const std::optional<Met> met = meet();
    if (!met) break;
    const std::vector<uint64_t> frees(met->entry.body, met->entry.body + met->entry.header.frees);
    if (was_freed(met->offset)) continue;
    for (const uint64_t handle : frees)
      if (wanted.erase(handle) != 0) found.emplace(handle, met->entry.header.index);
  }
  return found;
}

// Of one that nobody wants to see only what it makes and frees.
LogWalk::Read LogWalk::read(const Met& met, bool wanted) const {
  const Record& header = met.entry.header;
  const uint64_t* body = met.entry.body;
  Read found;
  WalkedRecord& record = found.record;
  if (wanted)
    record.view = view_record(log_, met.entry, met.offset);
  else
    record.view.frees.assign(body, body + header.frees);
  const auto see = [&](const BufferUse& use) {
    if (use.how == How::kResultsFrom) {
      record.results_from = use.handle;
      return;
    }
    if (use.how == How::kMade) found.made.push_back(use.handle);
    if (wanted && record.buffers.size() < kMostNamed)
      record.buffers.push_back({use, {}});
    else
      record.left_out++;
  };
  try {
    const Words words(body + header.frees, (header.bytes - sizeof(Record)) / 8 - header.frees);
    for_each_buffer(log_, static_cast<Kind>(header.kind), header.aux, words, see);
  } catch (const LogError&) {
    record.makes_sense = false;
  }
  return found;
}

void LogWalk::follow(Read& found, const Record& header) {
  for (const uint64_t handle : found.record.view.frees) makers_.erase(handle);
  const Maker maker{header.index, static_cast<Kind>(header.kind), header.aux};
  for (NamedBuffer& buffer : found.record.buffers)
    buffer.maker = buffer.use.how == How::kMade ? maker : maker_of(buffer.use.handle);
  if (!found.record.makes_sense || found.made.size() > kMostMade) knows_all_ = false;
  found.made.resize(std::min(found.made.size(), kMostMade));
  for (const uint64_t handle : found.made) remember(handle, maker);
  if (!found.record.results_from) return;
  results_.insert_or_assign(*found.record.results_from, maker);
  if (results_.size() <= kMostResults) return;
  results_.erase(results_.begin());
  knows_all_ = false;
}

void LogWalk::remember(uint64_t handle, const Maker& maker) {
  if (makers_.size() < kMostFollowed || makers_.contains(handle))
    makers_.insert_or_assign(handle, maker);
  else
    knows_all_ = false;
}

std::optional<Maker> LogWalk::maker_of(uint64_t handle) const {
  if (const auto made = makers_.find(handle); made != makers_.end()) return made->second;
  const auto behind = results_.upper_bound(handle);
  if (behind == results_.begin()) return std::nullopt;
  const auto& [from, maker] = *std::prev(behind);
  return handle - from < kHandlesPerSyncCall ? std::optional(maker) : std::nullopt;
}

}  // namespace understudy::replay
