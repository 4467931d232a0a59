#include "replay/csrc/rewind/marks.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace understudy::replay {
namespace {

constexpr uint64_t kWords = sizeof(CommunicatorMark) / 8;
constexpr size_t kHead = offsetof(CommitEntry, communicator);

}  // namespace

uint64_t further_marks(uint64_t communicators) {
  return std::min(std::max(communicators, kMarksInPlace) - kMarksInPlace, kMoreMarks);
}

Marks place_marks(CommitEntry& entry, const Marks& all) {
  const size_t placed = std::min<size_t>(all.size(), kMarksInPlace);
  std::copy_n(all.begin(), placed, entry.communicator);
  entry.communicators = static_cast<uint32_t>(all.size());
  return {all.begin() + static_cast<ptrdiff_t>(placed), all.end()};
}

Marks read_more_marks(const LogMap& log, uint64_t row, uint64_t communicators) {
  Marks found(log.marks() != nullptr ? further_marks(communicators) : 0);
  if (found.empty()) return found;
  const uint64_t* const from = log.marks() + row * kMoreMarks * kWords;
  for (size_t i = 0; i < found.size(); i++) {
    uint64_t words[kWords];
    for (size_t k = 0; k < kWords; k++) words[k] = __atomic_load_n(from + i * kWords + k, __ATOMIC_RELAXED);
    std::memcpy(&found[i], words, sizeof words);
  }
  return found;
}

bool write_more_marks(LogMap& log, uint64_t row, const Marks& marks) {
  if (marks.empty()) return true;
  if (marks.size() > kMoreMarks || !log.reserve_marks(row, marks.size())) return false;
  uint64_t* const to = log.marks() + row * kMoreMarks * kWords;
  for (size_t i = 0; i < marks.size(); i++) {
    uint64_t words[kWords];
    std::memcpy(words, &marks[i], sizeof words);
    for (size_t k = 0; k < kWords; k++) __atomic_store_n(to + i * kWords + k, words[k], __ATOMIC_RELAXED);
  }
  return true;
}

std::vector<uint8_t> encode_row(const CommitRow& row) {
  std::vector<uint8_t> bytes(kStoredCommitBytes + row.more.size() * sizeof(CommunicatorMark));
  std::memcpy(bytes.data(), static_cast<const CommitEntry*>(&row), kStoredCommitBytes);
  if (!row.more.empty())
    std::memcpy(bytes.data() + kStoredCommitBytes, row.more.data(), bytes.size() - kStoredCommitBytes);
  return bytes;
}

CommitRow decode_row(std::string_view bytes) {
  CommitRow row{};
  if (bytes.size() >= kStoredCommitBytes)
    std::memcpy(static_cast<CommitEntry*>(&row), bytes.data(), kStoredCommitBytes);
  const uint64_t more = further_marks(row.communicators);
  if (row.communicators > kMaxCommunicators) throw LogError("the stored row of a commit makes no sense");
  if (bytes.size() != kStoredCommitBytes + more * sizeof(CommunicatorMark))
    throw LogError("the stored row of a commit has another size");
  row.more.resize(more);
  if (more != 0)
    std::memcpy(row.more.data(), bytes.data() + kStoredCommitBytes, more * sizeof(CommunicatorMark));
  return row;
}

std::string encode_short_row(const CommitRow& row) {
  const uint64_t placed = std::min<uint64_t>(row.communicators, kMarksInPlace);
  std::string bytes;
  const auto add = [&bytes](const void* from, size_t count) {
    bytes.append(static_cast<const char*>(from), count);
  };
  add(static_cast<const CommitEntry*>(&row), kHead);
  add(&row.step_digest, sizeof row.step_digest);
  add(row.communicator, placed * sizeof(CommunicatorMark));
  add(row.more.data(), row.more.size() * sizeof(CommunicatorMark));
  return bytes;
}

CommitRow decode_short_row(std::string_view bytes) {
  CommitRow row{};
  const auto take = [&bytes](void* to, size_t count) {
    if (bytes.size() < count) throw LogError("the row of a commit is too short");
    if (count != 0) std::memcpy(to, bytes.data(), count);
    bytes.remove_prefix(count);
  };
  take(static_cast<CommitEntry*>(&row), kHead);
  take(&row.step_digest, sizeof row.step_digest);
  if (row.communicators > kMaxCommunicators) throw LogError("the row of a commit makes no sense");
  take(row.communicator, std::min<uint64_t>(row.communicators, kMarksInPlace) * sizeof(CommunicatorMark));
  row.more.resize(further_marks(row.communicators));
  take(row.more.data(), row.more.size() * sizeof(CommunicatorMark));
  if (!bytes.empty()) throw LogError("the row of a commit is too long");
  return row;
}

}  // namespace understudy::replay
