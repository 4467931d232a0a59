#include "proxy_server/csrc/passed_records.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "replay/csrc/futex.h"

namespace understudy::server {
namespace {

constexpr uint64_t kRecordsPerMark = 32;
constexpr size_t kMostMarks = 256;  // more would not be passed any sooner

}  // namespace

void PassedRecords::given_to_gpu(uint64_t index) {
  const uint64_t awaited = page_.awaited_index.load(std::memory_order_relaxed);
  if (index % kRecordsPerMark != 0 && index != awaited) return;
  wanted_ = wanted_ || awaited != 0;
  if (!wanted_) return;
  mark(index);
  look();
}

bool PassedRecords::idle(uint64_t index) {
  if (device_.is_cpu()) return false;
  const uint64_t awaited = page_.awaited_index.load();
  wanted_ = wanted_ || awaited != 0;
  if (!wanted_) return false;
  if (marked_ != index) mark(index);
  look();
  return awaited > page_.passed_index.load(std::memory_order_relaxed) && !marks_.empty();
}

void PassedRecords::stand_at(uint64_t index) {
  marks_.clear();
  marked_ = 0;
  page_.passed_index.store(index);
}

// What goes wrong here goes wrong again at the next record that asks the device, where it is told.
void PassedRecords::mark(uint64_t index) {
  if (marks_.size() >= kMostMarks) return;
  try {
    if (spare_.empty()) spare_.emplace_back(device_.type());
    c10::Event event = std::move(spare_.back());
    spare_.pop_back();
    event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    marks_.push_back({index, std::move(event)});
    marked_ = index;
  } catch (const std::exception&) {
    marks_.clear();
  }
}

void PassedRecords::look() {
  try {
    uint64_t passed = 0;
    for (; !marks_.empty() && marks_.front().event.query(); marks_.pop_front()) {
      passed = marks_.front().index;
      spare_.push_back(std::move(marks_.front().event));
    }
    if (passed == 0) return;
    page_.passed_index.store(passed);
    const uint64_t awaited = page_.awaited_index.load();
    if (awaited != 0 && awaited <= passed) tell();
  } catch (const std::exception&) {
    marks_.clear();
  }
}

void PassedRecords::tell() {
  if (page_.worker_sleeping.load() == 0) return;
  page_.reply_futex.fetch_add(1);
  replay::futex_wake(page_.reply_futex);
}

}  // namespace understudy::server
