#include "recovery/snapshots/csrc/store/unit_reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "recovery/snapshots/csrc/format/store_format.h"

namespace understudy::persistence {
namespace {

constexpr uint64_t kRequest = 4 << 20;        // smaller ones halve a disk's speed
constexpr uint64_t kUnderWay = 64 << 20;      // bytes, of a thread
constexpr uint32_t kAtATime = 16;             // requests under way, of a thread
constexpr uint64_t kWorthInPlace = 64 << 10;  // below it, a copy costs less than a request
constexpr uint64_t kStep = 128 << 10;         // is digested and copied while it is in the nearest caches
constexpr uint32_t kThreads = 4;              // where a read holds up its thread

uint64_t end_of(const Unit& unit) { return unit.offset + unit.bytes; }
uint64_t end_of(const Piece& piece) { return piece.offset + piece.bytes; }

template <class Part>
auto first_behind(const std::vector<Part>& parts, uint64_t offset) {
  return std::upper_bound(parts.begin(), parts.end(), offset,
                          [](uint64_t at, const Part& part) { return at < end_of(part); });
}

// Units that are read by one thread, one after another.
struct Batch {
  size_t first, last;
};

// `together`: a thread can have many requests under way, so that neighbours need not be parted for others.
std::vector<Batch> batches_of(const std::vector<Unit>& units, bool together) {
  std::vector<Batch> batches;
  for (size_t first = 0; first < units.size();) {
    const uint64_t begin = units[first].offset;
    size_t last = first + 1;
    for (; last < units.size(); last++) {
      if (units[last].offset > end_of(units[last - 1]) + kWorthInPlace) break;
      if (!together && end_of(units[last]) > begin + kRequest) break;
    }
    batches.push_back({first, last});
    first = last;
  }
  return batches;
}

// A part of the payload, whole blocks.
struct Request {
  uint64_t offset, bytes;
  uint8_t* in_place = nullptr;  // none: it goes through memory of the reader
  size_t batch = 0;
};

// Puts the requests for a batch behind `requests`.
void plan(const Wanted& wanted, const Batch& batch, size_t number, std::deque<Request>& requests) {
  const uint64_t first = wanted.units[batch.first].offset, last = end_of(wanted.units[batch.last - 1]);
  uint64_t at = first / kBlock * kBlock;
  const uint64_t end = rounded_up(last, kBlock);
  const auto ask = [&](uint64_t until, uint8_t* in_place) {
    for (; at < until; at += requests.back().bytes) {
      const uint64_t bytes = std::min(kRequest, until - at);
      requests.push_back({at, bytes, in_place, number});
      if (in_place != nullptr) in_place += bytes;
    }
  };
  auto piece = wanted.in_place ? first_behind(wanted.pieces, at) : wanted.pieces.end();
  while (piece != wanted.pieces.end() && piece->offset < end) {
    const uint64_t begin = piece->offset;
    uint8_t* const to = piece->to;
    uint64_t until = end_of(*piece);
    // As long as memory goes on as the payload does.
    for (++piece; piece != wanted.pieces.end() && piece->offset < end; ++piece) {
      const bool goes_on =
          reinterpret_cast<uintptr_t>(piece->to) - reinterpret_cast<uintptr_t>(to) == piece->offset - begin;
      if (!goes_on || piece->offset - until >= kBlock) break;
      until = end_of(*piece);
    }
    // A block that has parts of other batches is theirs as well, and they may find something else in it.
    const uint64_t whole = std::max(rounded_up(std::max(begin, first), kBlock), at);
    const uint64_t whole_end = std::min(until, last) / kBlock * kBlock;
    if ((reinterpret_cast<uintptr_t>(to) - begin) % kBlock != 0 || whole_end < whole + kWorthInPlace)
      continue;
    ask(whole, nullptr);
    ask(whole_end, to + (whole - begin));
  }
  ask(end, nullptr);
}

class Thread {
 public:
  Thread(uint64_t begin, const Wanted& wanted, const std::vector<Batch>& batches, std::atomic<size_t>& next,
         const std::function<void(size_t, bool)>& tell, std::unique_ptr<Reader> reader)
      : begin_(begin),
        wanted_(wanted),
        batches_(batches),
        next_(next),
        tell_(tell),
        reader_(std::move(reader)) {}

  void run() {
    for (;;) {
      while (submit_one());
      if (under_way_.empty()) return;
      while (!under_way_.front().ended) end_one();
      take(under_way_.front());
      if (under_way_.front().memory) spare_.push_back(std::move(under_way_.front().memory));
      bytes_ -= under_way_.front().request.bytes;
      under_way_.pop_front();
      first_token_++;
    }
  }

 private:
  struct UnderWay {
    Request request;
    AlignedMemory memory{};  // of kRequest bytes
    bool ended = false, read = false;
    uint8_t* content() const { return request.in_place != nullptr ? request.in_place : memory.get(); }
  };

  bool submit_one() {
    if (under_way_.size() >= std::min(reader_->depth(), kAtATime)) return false;
    if (planned_.empty()) {
      const size_t number = next_.fetch_add(1, std::memory_order_relaxed);
      if (number >= batches_.size()) return false;
      plan(wanted_, batches_[number], number, planned_);
    }
    if (!under_way_.empty() && bytes_ + planned_.front().bytes > kUnderWay) return false;
    UnderWay& one = under_way_.emplace_back(UnderWay{planned_.front()});
    planned_.pop_front();
    bytes_ += one.request.bytes;
    if (one.request.in_place == nullptr) {
      if (spare_.empty()) spare_.push_back(aligned_memory(kRequest));
      one.memory = std::move(spare_.back());
      spare_.pop_back();
    }
    reader_->submit(begin_ + one.request.offset, one.content(), one.request.bytes,
                    first_token_ + under_way_.size() - 1);
    return true;
  }

  void end_one() {
    const Reader::Ended ended = reader_->wait();
    const uint64_t at = ended.token - first_token_;
    if (at >= under_way_.size() || under_way_[at].ended)
      throw StorageError(EPROTO, "a read ended that never began");
    under_way_[at].ended = true;
    under_way_[at].read = ended.read;
  }

  // In the order of the payload, so that digests can go on.
  void take(const UnderWay& one) {
    const uint64_t end = one.request.offset + one.request.bytes;
    const Batch& batch = batches_[one.request.batch];
    if (!inside_ || batch_ != one.request.batch) begin_batch(one.request.batch);
    right_ = right_ && one.read;
    for (uint64_t at = one.request.offset; at < end;) {
      const uint64_t until = std::min(at + kStep, end);
      const uint8_t* const content = one.content() + (at - one.request.offset);
      for (; unit_ < batch.last; begin_unit(unit_ + 1, one.read)) {
        const Unit& unit = wanted_.units[unit_];
        const uint64_t from = std::max(at, unit.offset), to = std::min(until, end_of(unit));
        if (from < to && right_) digest_.add(content + (from - at), to - from);
        if (end_of(unit) > until) break;
        tell_(unit_, right_ && digest_.value() == unit.digest);
      }
      if (one.request.in_place == nullptr && one.read) scatter(content, at, until, batch);
      at = until;
    }
    if (unit_ == batch.last) inside_ = false;
  }

  void begin_batch(size_t number) {
    batch_ = number;
    inside_ = true;
    begin_unit(batches_[number].first, true);
  }

  // `right`: whether what it may share with the one before could be read.
  void begin_unit(size_t unit, bool right) {
    unit_ = unit;
    right_ = right;
    if (unit < batches_[batch_].last) digest_.begin(wanted_.units[unit]);
  }

  // What the batch has of it.
  void scatter(const uint8_t* content, uint64_t start, uint64_t stop, const Batch& batch) const {
    const uint64_t begin = std::max(start, wanted_.units[batch.first].offset);
    const uint64_t end = std::min(stop, end_of(wanted_.units[batch.last - 1]));
    content += begin - start;
    auto piece = first_behind(wanted_.pieces, begin);
    for (; piece != wanted_.pieces.end() && piece->offset < end; ++piece) {
      const uint64_t from = std::max(begin, piece->offset), to = std::min(end, end_of(*piece));
      if (from < to) std::memcpy(piece->to + (from - piece->offset), content + (from - begin), to - from);
    }
  }

  const uint64_t begin_;
  const Wanted& wanted_;
  const std::vector<Batch>& batches_;
  std::atomic<size_t>& next_;
  const std::function<void(size_t, bool)>& tell_;
  std::deque<Request> planned_;
  std::vector<AlignedMemory> spare_;
  std::deque<UnderWay> under_way_;
  uint64_t first_token_ = 0;  // of the front
  uint64_t bytes_ = 0;        // under way
  bool inside_ = false;       // a batch
  size_t batch_ = 0, unit_ = 0;
  bool right_ = true;  // all of the unit so far could be read
  UnitDigest digest_;
  const std::unique_ptr<Reader> reader_;  // the last, so the first to go: it waits for what is under way
};

}  // namespace

void read_units(const Storage& storage, uint64_t begin, const Wanted& wanted,
                const std::function<void(size_t, bool)>& tell) {
  std::vector<Unit> content;
  std::vector<size_t> numbers;
  for (size_t unit = 0; unit < wanted.units.size(); unit++) {
    if (wanted.units[unit].bytes == 0) continue;  // nothing to read, and nothing that could be wrong
    content.push_back(wanted.units[unit]);
    numbers.push_back(unit);
  }
  const std::function<void(size_t, bool)> tell_of = [&](size_t unit, bool right) {
    tell(numbers[unit], right);
  };
  const Wanted of_content{content, wanted.pieces, wanted.in_place};
  std::unique_ptr<Reader> reader = storage.reader();
  const bool many = reader->depth() > 1;
  const std::vector<Batch> batches = batches_of(content, many);
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto guarded = [&](auto&& work) {
    try {
      work();
    } catch (...) {
      next.store(batches.size());
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const auto run = [&](std::unique_ptr<Reader> with) {
    Thread(begin, of_content, batches, next, tell_of, std::move(with)).run();
  };
  {
    std::vector<std::jthread> others;
    for (size_t i = 1; !many && i < std::min<size_t>(kThreads, batches.size()); i++) {
      try {
        others.emplace_back([&] { guarded([&] { run(storage.reader()); }); });
      } catch (const std::system_error&) {
        break;  // no more threads to be had
      }
    }
    guarded([&] { run(std::move(reader)); });
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace understudy::persistence
