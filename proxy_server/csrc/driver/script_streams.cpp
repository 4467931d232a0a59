#include "proxy_server/csrc/driver/script_streams.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace understudy::server {
namespace {

c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

c10::Event recorded_on(c10::Stream stream) {
  c10::Event event(c10::kCUDA);
  event.record(stream);
  return event;
}

}  // namespace

ScriptStreams::ScriptStreams(c10::Device device) : device_(device) {
  if (device_.is_cpu()) return;
  streams_[0] = guard().getDefaultStream(device_);
  open_ = 1;
}

c10::Stream ScriptStreams::at(uint64_t stream) {
  std::optional<c10::Stream>& found = streams_.at(replay::place_of_stream(stream));
  if (!found) {
    found = guard().getStreamFromGlobalPool(device_, /*isHighPriority=*/stream % 2 != 0);
    open_++;
    const c10::Event before = recorded_on(*streams_[0]);  // what was there before any was made
    before.block(*found);
    if (!copies_) {
      copies_ = guard().getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
      before.block(*copies_);
    }
    if (opened_) opened_(*found);
  }
  return *found;
}

c10::Stream ScriptStreams::current() const { return guard().getStream(device_); }

void ScriptStreams::enter(uint64_t stream) {
  if (device_.is_cpu()) return;
  guard().exchangeStream(at(stream));
}

void ScriptStreams::mark(uint64_t mark, uint64_t stream) {
  if (!device_.is_cpu()) keep(mark, {recorded_on(at(stream)), {}});
}

// Those that have ended hold memory no longer.
void ScriptStreams::mark(uint64_t mark, Works works) {
  if (device_.is_cpu()) return;
  std::erase_if(unended_, [this](uint64_t older) {
    const auto known = marks_.find(older);
    if (known == marks_.end()) return true;
    Works& of_it = known->second.works;
    if (!std::all_of(of_it.begin(), of_it.end(), [](const auto& work) { return work->isCompleted(); }))
      return false;
    of_it.clear();
    return true;
  });
  if (find(mark) == nullptr) unended_.push_back(mark);
  keep(mark, {std::nullopt, std::move(works)});
}

void ScriptStreams::keep(uint64_t mark, Mark what) {
  if (!marks_.insert_or_assign(mark, std::move(what)).second) return;
  order_.push_back(mark);
  for (; order_.size() > kMostMarks; order_.pop_front(), dropped_ = true) marks_.erase(order_.front());
}

void ScriptStreams::wait(uint64_t mark, uint64_t stream) {
  if (device_.is_cpu()) return;
  const c10::Stream waits = at(stream);
  if (const Mark* const known = find(mark); known && known->event) return known->event->block(waits);
  if (is_past(mark)) return;
  each([&](size_t, c10::Stream other) {
    if (other != waits) recorded_on(other).block(waits);
  });
}

void ScriptStreams::use(const c10::Storage& content, uint64_t stream) {
  if (!device_.is_cpu()) use(content, at(stream));
}

void ScriptStreams::use_here(const c10::Storage& content) const {
  if (!several()) return;
  use(content, current());
  use(content, *copies_);
}

void ScriptStreams::use(const c10::Storage& content, c10::Stream stream) const {
  if (content.device().is_cuda() && content.data() != nullptr)
    c10::getDeviceAllocator(device_.type())->recordStream(content.data_ptr(), stream);
}

void ScriptStreams::on(uint64_t stream, const std::function<void()>& act) {
  const c10::StreamGuard there(at(stream));
  act();
}

const ScriptStreams::Mark* ScriptStreams::find(uint64_t mark) const {
  const auto known = marks_.find(mark);
  return known == marks_.end() ? nullptr : &known->second;
}

void ScriptStreams::forget_marks() {
  marks_.clear();
  order_.clear();
  unended_.clear();
  dropped_ = false;
}

c10::Event ScriptStreams::mark_here() const { return recorded_on(current()); }

void ScriptStreams::each(const std::function<void(size_t, c10::Stream)>& act) const {
  for (size_t place = 0; place < streams_.size(); place++)
    if (streams_[place]) act(place, *streams_[place]);
}

size_t ScriptStreams::current_place() const {
  const c10::Stream mine = current();
  size_t found = 0;
  each([&](size_t place, c10::Stream stream) {
    if (stream == mine) found = place;
  });
  return found;
}

void ScriptStreams::on_each_other(const std::function<void()>& act) const {
  if (!several()) return;
  const c10::Stream mine = current();
  each([&](size_t, c10::Stream other) {
    if (other == mine) return;
    const c10::StreamGuard there(other);
    act();
  });
}

c10::Stream ScriptStreams::for_copies() const { return several() ? *copies_ : current(); }

void ScriptStreams::copied() {
  if (!several()) return;
  copied_ = recorded_on(*copies_);
  times_copied_++;
}

void ScriptStreams::stay_behind_copies() {
  if (!several()) return;
  uint64_t& behind = behind_[current_place()];
  if (behind == times_copied_) return;
  copied_->block(current());
  behind = times_copied_;
}

c10::Stream ScriptStreams::for_snapshots() {
  if (!snapshots_) snapshots_ = guard().getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
  return *snapshots_;
}

void ScriptStreams::gather() {
  if (!several()) return;
  each([&](size_t place, c10::Stream other) {
    if (place != 0) recorded_on(other).block(*streams_[0]);
  });
  recorded_on(*copies_).block(*streams_[0]);
}

void ScriptStreams::spread() {
  if (!several()) return;
  const c10::Event here = recorded_on(*streams_[0]);
  each([&](size_t place, c10::Stream other) {
    if (place != 0) here.block(other);
  });
  here.block(*copies_);
}

OnDefaultStream::OnDefaultStream(ScriptStreams& streams)
    : streams_(streams.several() ? &streams : nullptr),
      before_(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0)) {
  if (streams_ == nullptr) return;
  if (streams_->together_ == 0) {
    streams_->gather();
    before_ = guard().exchangeStream(*streams_->streams_[0]);
  }
  streams_->together_++;
}

// What the device refuses here it refuses again to whoever asks it next.
OnDefaultStream::~OnDefaultStream() {
  if (streams_ == nullptr || --streams_->together_ != 0) return;
  try {
    guard().exchangeStream(before_);
    streams_->spread();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

}  // namespace understudy::server
