#include "proxy_server/csrc/collectives/communicator_marks.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "proxy_server/csrc/collectives/collectives.h"
#include "replay/csrc/rewind/marks.h"

namespace understudy::server {
namespace {

constexpr uint64_t kPeerRow = ~0ull;   // in a manifest row's `size`: counts messages with the peer in `rank`,
                                       // and in `timeout_ms` those of them that were sent to it
constexpr uint64_t kGroupRow = ~1ull;  // there, too: all members met for a group of messages

}  // namespace

// Ranks have 32 bits, and to multiply by an odd number loses none: no two of a communicator's are alike.
uint64_t uid_of_messages(uint64_t uid_low, uint64_t from, uint64_t to) {
  return uid_low ^ (((from << 32 | to) + 1) * 0x9E3779B97F4A7C15ull);
}

uint64_t uid_of_pair(uint64_t uid_low, uint64_t one, uint64_t other) {
  return uid_of_messages(uid_low, std::min(one, other), std::max(one, other));
}

void check_rank(uint64_t rank, uint64_t size) {
  if (size == 0 || size > 65536 || rank >= size)
    throw replay::LogError("a communicator has an impossible rank or size");
}

// So that proxyd can tell a rank that waits for a peer's program from one that waits in vain.
void Communicators::publish_started() {
  uint32_t n = 0;
  replay::Marks more;
  const auto put = [&](uint64_t low, uint64_t high, uint64_t sequence, uint64_t size) {
    if (n++ >= replay::kMarksInPlace) return more.push_back({low, high, sequence, size});
    replay::StartedMark& mark = page_.server().started[n - 1];
    mark.uid_low.store(low, std::memory_order_relaxed);
    mark.uid_high.store(high, std::memory_order_relaxed);
    mark.sequence.store(sequence, std::memory_order_relaxed);
    mark.size.store(size, std::memory_order_relaxed);
  };
  for (const auto& [handle, c] : communicators_) {
    put(c.uid_low, c.uid_high, c.sequence, c.size);
    for (const auto& [peer, sequence] : c.peer_sequence)
      put(uid_of_pair(c.uid_low, peer, c.rank), c.uid_high, sequence, 2);
  }
  // Without memory for the others, waiting in them is taken for a program's.
  if (!replay::write_more_marks(log_, replay::kStartedRow, more)) n = replay::kMarksInPlace;
  page_.server().started_count.store(n, std::memory_order_release);
}

replay::Marks Communicators::marks_of(const Communicator& c) {
  replay::Marks marks;
  // Its members connect all together, at their first use or at a rebuild: the first use counts, too, and so
  // does that all met for a group of messages, so that no cut has some of them before it and others behind.
  const uint64_t met = c.sequence != 0 ? c.sequence + 2 : c.met_in_group ? 2 : used(c) ? 1 : 0;
  if (c.size > 1) marks.push_back({c.uid_low, c.uid_high, met, c.size});
  // Messages from one rank to another count as a communicator of these two, for each direction: a send may
  // end before its message is received, so two that cross each other must not make up for one another.
  for (const auto& [peer, sequence] : c.peer_sequence) {
    const auto sends = c.sent.find(peer);
    const uint64_t sent = sends == c.sent.end() ? 0 : sends->second;
    marks.push_back({uid_of_messages(c.uid_low, c.rank, peer), c.uid_high, sent, 2});
    marks.push_back({uid_of_messages(c.uid_low, peer, c.rank), c.uid_high, sequence - sent, 2});
  }
  return marks;
}

replay::Marks Communicators::marks() {
  replay::Marks all;
  for (const auto& [handle, c] : communicators_)
    for (const auto& mark : marks_of(c)) all.push_back(mark);
  // One that was made, used and given up since the commit before: nobody would know that its members stand
  // on different sides of it.
  all.insert(all.end(), given_up_.begin(), given_up_.end());
  given_up_.clear();
  return all;
}

std::vector<replay::ManifestCommunicator> Communicators::manifest() const {
  std::vector<replay::ManifestCommunicator> rows;
  for (const auto& [handle, c] : communicators_) {
    rows.push_back({handle, c.uid_low, c.uid_high, c.rank, c.size, c.sequence, c.timeout_ms});
    if (c.met_in_group) rows.push_back({handle, c.uid_low, c.uid_high, 0, kGroupRow, 0, 0});
    for (const auto& [peer, sequence] : c.peer_sequence)
      rows.push_back({handle, c.uid_low, c.uid_high, peer, kPeerRow, sequence,
                      c.sent.count(peer) != 0 ? c.sent.at(peer) : 0});
  }
  return rows;
}

void Communicators::restore(const std::vector<replay::ManifestCommunicator>& rows) {
  std::map<uint64_t, Communicator> restored;
  for (const auto& row : rows) {
    Communicator& c = restored[row.communicator];
    if (row.size == kPeerRow) {
      c.peer_sequence[row.rank] = row.sequence;
      c.sent[row.rank] = row.timeout_ms;
      continue;
    }
    if (row.size == kGroupRow) {
      c.met_in_group = true;
      continue;
    }
    check_rank(row.rank, row.size);
    c.uid_low = row.uid_low;
    c.uid_high = row.uid_high;
    c.rank = row.rank;
    c.size = row.size;
    c.sequence = row.sequence;
    c.timeout_ms = row.timeout_ms;
  }
  given_up_.clear();
  std::lock_guard<std::mutex> lock(backends_mutex_);
  communicators_ = std::move(restored);
  publish_started();
}

}  // namespace understudy::server
