#include "proxy_server/csrc/executor/passed_records.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "replay/csrc/log/futex.h"

namespace understudy::server {
namespace {

constexpr uint64_t kRecordsPerMark = 32;
constexpr size_t kMostMarks = 256;  // more would not be passed any sooner

}  // namespace

void PassedRecords::given_to_gpu(uint64_t index) {
  const uint64_t awaited = page_.worker().awaited_index.load(std::memory_order_relaxed);
  if (index % kRecordsPerMark != 0 && index != awaited) return;
  wanted_ = wanted_ || awaited != 0;
  if (!wanted_) return;
  mark(index);
  look();
}

bool PassedRecords::idle(uint64_t index) {
  if (driver_.device().is_cpu()) return false;
  const uint64_t awaited = page_.worker().awaited_index.load();
  wanted_ = wanted_ || awaited != 0;
  if (!wanted_) return false;
  mark(index);
  look();
  return awaited > page_.server().passed_index.load(std::memory_order_relaxed) &&
         std::any_of(streams_.begin(), streams_.end(),
                     [](const OfStream& one) { return !one.marks.empty(); });
}

void PassedRecords::stand_at(uint64_t index) {
  for (size_t place = 0; place < streams_.size(); place++) {
    streams_[place] = {{}, 0, index};
    page_.server().passed_of_stream[place].store(driver_.streams().several() ? index : 0);
  }
  page_.server().passed_index.store(index);
}

void PassedRecords::all_passed(uint64_t index) {
  if (driver_.device().is_cpu()) return;
  driver_.streams().each([&](size_t place, c10::Stream) { publish(place, index); });
  page_.server().passed_index.store(index);
}

void PassedRecords::current_passed(uint64_t index) {
  if (driver_.device().is_cpu()) return;
  if (!driver_.streams().several()) return all_passed(index);
  publish(driver_.streams().current_place(), index);
}

// Marks in front of it have been passed, too.
void PassedRecords::publish(size_t place, uint64_t passed) {
  OfStream& one = streams_[place];
  for (; !one.marks.empty() && one.marks.front().index <= passed; one.marks.pop_front())
    spare_.push_back(std::move(one.marks.front().event));
  one.passed = std::max(one.passed, passed);
  if (driver_.streams().several()) page_.server().passed_of_stream[place].store(one.passed);
}

// What goes wrong here goes wrong again at the next record that asks the device, where it is told; but for a
// device that is lost, as a script that only asks for its events sends none.
void PassedRecords::forget(const std::exception& why) {
  for (OfStream& one : streams_) one.marks.clear(), one.marked = 0;
  if (driver_.lost(why)) throw;
}

// Streams on which there are too many get theirs later.
void PassedRecords::mark(uint64_t index) {
  try {
    driver_.streams().each([&](size_t place, c10::Stream stream) {
      OfStream& one = streams_[place];
      if (one.marked == index || one.marks.size() >= kMostMarks) return;
      if (spare_.empty()) spare_.emplace_back(driver_.device().type());
      c10::Event event = std::move(spare_.back());
      spare_.pop_back();
      event.record(stream);
      one.marks.push_back({index, std::move(event)});
      one.marked = index;
    });
  } catch (const std::exception& e) {
    forget(e);
  }
}

void PassedRecords::look() {
  const uint64_t awaited = page_.worker().awaited_index.load();
  bool told = false;
  try {
    uint64_t all = ~0ull;
    driver_.streams().each([&](size_t place, c10::Stream) {
      OfStream& one = streams_[place];
      const uint64_t before = one.passed;
      for (; !one.marks.empty() && one.marks.front().event.query(); one.marks.pop_front()) {
        one.passed = one.marks.front().index;
        spare_.push_back(std::move(one.marks.front().event));
      }
      all = std::min(all, one.passed);
      if (one.passed == before) return;
      if (driver_.streams().several()) page_.server().passed_of_stream[place].store(one.passed);
      told = told || (awaited != 0 && awaited <= one.passed);
    });
    if (all > page_.server().passed_index.load(std::memory_order_relaxed))
      page_.server().passed_index.store(all);
  } catch (const std::exception& e) {
    forget(e);
  }
  if (told) tell();
}

void PassedRecords::tell() {
  if (page_.shared().worker_sleeping.load() == 0) return;
  page_.shared().reply_futex.fetch_add(1);
  replay::futex_wake(page_.shared().reply_futex);
}

}  // namespace understudy::server
