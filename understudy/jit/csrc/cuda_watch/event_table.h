// Which of the script's events stand behind collectives. Bounded: with more events than fit, the oldest are
// forgotten, and waits for them are not seen.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

namespace understudy::cuda {

// A place in a watched stream: all collectives up to number `last`.
struct Place {
  int stream = 0;
  std::uint64_t last = 0;

  bool operator==(const Place&) const = default;
};

class EventTable {
 public:
  constexpr EventTable() = default;

  void note(Event event, Place place) {
    const std::lock_guard lock(mutex_);
    Entry* const bucket = bucket_of(event);
    Entry* entry = find(bucket, event);
    if (entry == nullptr) entry = find(bucket, nullptr);
    if (entry == nullptr) entry = bucket + (next_++ % kWays);
    entry->place = place;
    entry->event.store(event, std::memory_order_release);
  }

  // It is recorded elsewhere now, or destroyed, and its handle may come again.
  void forget(Event event) {
    Entry* const bucket = bucket_of(event);
    if (find(bucket, event) == nullptr) return;  // nearly always
    const std::lock_guard lock(mutex_);
    if (Entry* const entry = find(bucket, event)) entry->event.store(nullptr, std::memory_order_release);
  }

  std::optional<Place> place_of(Event event) {
    Entry* const bucket = bucket_of(event);
    if (find(bucket, event) == nullptr) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const Entry* const entry = find(bucket, event);
    return entry != nullptr ? std::optional(entry->place) : std::nullopt;
  }

 private:
  static constexpr std::size_t kBuckets = 1024, kWays = 4;

  struct Entry {
    std::atomic<Event> event{nullptr};
    Place place;  // with the mutex
  };

  Entry* bucket_of(Event event) {
    const auto bits = reinterpret_cast<std::uintptr_t>(event);
    return entries_ + ((bits >> 4) * 0x9E3779B97F4A7C15u >> 54) % kBuckets * kWays;
  }

  static Entry* find(Entry* bucket, Event event) {
    for (std::size_t way = 0; way < kWays; way++)
      if (bucket[way].event.load(std::memory_order_acquire) == event) return bucket + way;
    return nullptr;
  }

  Entry entries_[kBuckets * kWays];
  std::mutex mutex_;
  std::size_t next_ = 0;  // with the mutex
};

}  // namespace understudy::cuda
