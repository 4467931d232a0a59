// Snapshots as an executor takes them, by the real Copier: buffers are overwritten and freed while they are
// copied, and lists are cut short.
//
//   copy_stress SNAPSHOTS SEED
//
// Ends with 1 and a sentence if a copy is not what its buffer was when its list was made.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>

#include "proxy_server/csrc/snapshots/copier.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::server {
namespace {

constexpr size_t kRows = 24;
constexpr uint64_t kPiece = 1024, kLargest = 5 * kPiece / 2;

// Where this thread takes a piece amid a row that the copier's thread copies, whoever of them the machine
// would have let run.
class Meeting {
 public:
  explicit Meeting(size_t row) : row_(row) {}
  // Called with each piece before it is copied: the first of the row waits for take().
  void arrive(size_t row, uint64_t offset) {
    if (row != row_ || offset != 0) return;
    there_.store(true);
    there_.notify_all();
    taken_.wait(false);
  }
  void take(CopyList& list) {
    there_.wait(false);
    list.copy_some(1);
    taken_.store(true);
    taken_.notify_all();
  }

 private:
  const size_t row_;
  std::atomic<bool> there_{false}, taken_{false};
};

struct Buffer {
  std::vector<uint8_t> content;  // its memory goes when it is freed
  uint64_t digest = 0;           // when the list was made
};

class Stress {
 public:
  explicit Stress(uint64_t seed) : chance_(seed) {
    area_ = static_cast<uint8_t*>(
        mmap(nullptr, kRows * kLargest, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (area_ == MAP_FAILED) std::abort();
    for (uint8_t& byte : noise_) byte = static_cast<uint8_t>(chance_());
  }
  ~Stress() { munmap(area_, kRows * kLargest); }

  void snapshot() {
    std::vector<Buffer> buffers(kRows);
    std::vector<CopyRow> rows(kRows);
    for (size_t i = 0; i < kRows; i++) {
      buffers[i].content.resize(below(4) == 0 ? below(kLargest) : below(100));
      change(buffers[i]);
      buffers[i].digest = replay::content_digest(buffers[i].content.data(), buffers[i].content.size());
      rows[i] = {buffers[i].content.size(), area_ + i * kLargest, true, below(2) == 0, below(2) == 0};
    }
    const size_t longest = longest_row(rows);
    const auto meeting = rows[longest].bytes > 2 * kPiece && below(2) == 0  //
                             ? std::make_shared<Meeting>(longest)
                             : nullptr;
    const std::optional<size_t> bad =  // of whose source the device says an error
        below(8) == 0 && !meeting ? std::optional(longest) : std::nullopt;
    std::vector<const uint8_t*> memory;
    for (const Buffer& b : buffers) memory.push_back(b.content.data());
    const auto list = std::make_shared<CopyList>(
        std::move(rows),
        [meeting, bad, memory = std::move(memory)](size_t row, uint64_t offset, uint64_t bytes, uint8_t* to) {
          if (row == bad) throw std::runtime_error("the source cannot be read");
          if (meeting) meeting->arrive(row, offset);
          if (bytes != 0) std::memcpy(to, memory[row] + offset, bytes);
        },
        kPiece);
    if (!copier_.start(list)) std::abort();
    if (meeting) meeting->take(*list);
    if (bad) return fail(*list, *bad);
    for (uint64_t left = below(2 * kRows); left > 0; left--) {
      const size_t row = below(kRows);
      list->settle(row);
      if (below(4) == 0)
        buffers[row].content = {};
      else
        change(buffers[row]);
      if (below(4) == 0) list->copy_some(1);  // a piece, maybe amid a row that the thread copies
    }
    if (below(4) == 0) {
      copier_.stop();  // and everything may change without asking
      for (Buffer& b : buffers) change(b);
      cut_short++;
      return;
    }
    if (below(2) == 0) list->copy_some(~0ull);
    copier_.wait();
    check(*list, buffers);
    whole++;
  }

  uint64_t whole = 0, cut_short = 0, failed = 0, wrong = 0;

 private:
  // Whoever comes to it, all others get on, and the list has failed.
  void fail(CopyList& list, size_t bad) {
    try {
      if (below(2) == 0) list.settle(below(kRows));
      if (below(2) == 0) list.settle(bad);
      if (below(2) == 0) list.copy_some(~0ull);
    } catch (const std::runtime_error&) {
    }
    copier_.wait();
    failed++;
    if (!list.failed()) wrong++;
  }

  void change(Buffer& b) {
    if (!b.content.empty()) std::memcpy(b.content.data(), noise_.data() + below(kLargest), b.content.size());
  }
  uint64_t below(uint64_t end) { return chance_() % end; }
  static size_t longest_row(const std::vector<CopyRow>& rows) {
    const auto shorter = [](const CopyRow& a, const CopyRow& b) { return a.bytes < b.bytes; };
    return static_cast<size_t>(std::max_element(rows.begin(), rows.end(), shorter) - rows.begin());
  }

  void check(const CopyList& list, const std::vector<Buffer>& buffers) {
    if (!list.finished() || list.failed()) wrong++;
    for (size_t i = 0; i < kRows; i++) {
      const CopyRow& row = list.rows()[i];
      if (replay::content_digest(row.to, row.bytes) != buffers[i].digest) wrong++;
      if (row.digests && row.digest != buffers[i].digest) wrong++;
    }
  }

  std::mt19937_64 chance_;
  uint8_t* area_;
  std::vector<uint8_t> noise_ = std::vector<uint8_t>(2 * kLargest);
  Copier copier_{[] {}};
};

}  // namespace
}  // namespace understudy::server

int main(int, char** arguments) {
  understudy::server::Stress stress(std::strtoull(arguments[2], nullptr, 10));
  for (uint64_t left = std::strtoull(arguments[1], nullptr, 10); left > 0 && stress.wrong == 0; left--)
    stress.snapshot();
  std::printf("%llu whole, %llu cut short, %llu failed, %llu wrong copies\n",
              static_cast<unsigned long long>(stress.whole),
              static_cast<unsigned long long>(stress.cut_short),
              static_cast<unsigned long long>(stress.failed), static_cast<unsigned long long>(stress.wrong));
  return stress.wrong != 0;
}
