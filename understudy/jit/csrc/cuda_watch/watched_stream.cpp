#include "understudy/jit/csrc/cuda_watch/watched_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"

namespace understudy::cuda {
namespace {

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool record(Event& event, Stream stream) {
  if (!no_error_is_pending()) return false;
  const AmidCaptures allowed;
  if (event == nullptr && real::event_create(&event, kDisableTiming) != kSuccess) {
    event = nullptr;
    real::get_last_error();
    return false;
  }
  if (real::event_record(event, stream) == kSuccess) return true;
  real::get_last_error();
  return false;
}

}  // namespace

void WatchedStream::begin() {
  const std::lock_guard lock(mutex_);
  if (unmarked_++ == 0) unmarked_since_ = now();
}

bool WatchedStream::mark(std::uint64_t calls) {
  const std::lock_guard lock(mutex_);
  return mark_locked(calls);
}

bool WatchedStream::mark_locked(std::uint64_t calls) {
  const std::int64_t since = std::exchange(unmarked_since_, now());
  unmarked_ -= calls;
  marked_ += calls;
  const bool full = behind_ - first_ == kMarks;
  Mark& mark = at(full ? behind_ - 1 : behind_);
  if (record(mark.event, stream_)) {
    mark.last = marked_;
    if (full) {
      moved_++;
    } else {
      mark.since = since;
      behind_++;
    }
    return true;
  }
  if (first_ == behind_)
    ended_ = marked_;
  else
    at(behind_ - 1).last = marked_;
  return false;
}

void WatchedStream::mark_later(std::uint64_t calls) {
  const std::lock_guard lock(mutex_);
  late_ += calls;
}

std::uint64_t WatchedStream::event_recorded() {
  const std::lock_guard lock(mutex_);
  if (const std::uint64_t calls = std::exchange(late_, 0); calls > 0) mark_locked(calls);
  return marked_;
}

void WatchedStream::waited_for(std::uint64_t last) {
  const std::lock_guard lock(mutex_);
  waited_ = std::max(waited_, last);
  waits_++;
}

void WatchedStream::has_ended(std::uint64_t last) {
  const std::lock_guard lock(mutex_);
  ended_ = std::max(ended_, last);
  drop_ended();
}

Error WatchedStream::look() {
  for (;;) {
    Mark oldest;
    {
      const std::lock_guard lock(mutex_);
      if (first_ == behind_) return kSuccess;
      oldest = at(first_);
    }
    const Error answer = real::event_query(oldest.event);
    if (answer != kSuccess) return answer;
    const std::lock_guard lock(mutex_);
    if (first_ == behind_ || at(first_).event != oldest.event) continue;
    ended_ = std::max(ended_, oldest.last);
    drop_ended();
  }
}

void WatchedStream::drop_ended() {
  while (first_ != behind_ && at(first_).last <= ended_) first_++;
}

bool WatchedStream::pending() {
  const std::lock_guard lock(mutex_);
  return marked_ > ended_;
}

StreamFacts WatchedStream::facts() {
  const std::lock_guard lock(mutex_);
  StreamFacts facts;
  facts.stream = reinterpret_cast<std::uintptr_t>(stream_);
  facts.device = device_;
  facts.waiting = waited_ > ended_ ? 1 : 0;
  facts.begun = marked_ + unmarked_;
  facts.ended = ended_;
  facts.waits = waits_;
  facts.moved_marks = moved_;
  if (facts.begun > ended_)
    facts.oldest =
        static_cast<double>(now() - (first_ != behind_ ? at(first_).since : unmarked_since_)) * 1e-9;
  return facts;
}

}  // namespace understudy::cuda
