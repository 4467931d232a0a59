// Who may write which slot.  A slot is in exactly one place: in the queue (free), with a snapshot being
// written, in the registry, or in doubt.
//
// In doubt: the superblock that names it could not be made durable, and nobody knows whether it lies on the
// disk all the same.  Such a slot stays as it is until a superblock without it is durable.
#pragma once
#include <atomic>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "recovery/persistence/csrc/commit_rule.h"
#include "recovery/persistence/csrc/index_ring.h"

namespace understudy::persistence {

template <class Platform>
class SlotTable {
 public:
  // `last_sequence`: no snapshot that lies anywhere in the store has a larger one.
  SlotTable(Registry registry, uint64_t last_sequence)
      : free_(static_cast<uint32_t>(registry.slots.size())),
        registry_(std::move(registry)),
        floor_(registry_.floor),
        next_sequence_(last_sequence + 1) {
    for (uint32_t slot = 0; slot < registry_.slots.size(); slot++)
      if (registry_.slots[slot].sequence == 0) free_.push(slot);
  }

  // Rises with each call.
  uint64_t next_sequence() { return next_sequence_.fetch_add(1, std::memory_order_relaxed); }

  // A slot to write, or none at the deadline or after stop().  Where only slots in doubt are left, it settles
  // them; `write` as in commit().
  template <class Write>
  std::optional<uint32_t> acquire(uint64_t deadline, Write&& write) {
    for (;;) {
      const uint32_t seen = freed_.now();
      uint32_t slot = 0;
      if (free_.pop(slot)) return slot;
      if (settle(write)) continue;
      if (stopped_.load(std::memory_order_acquire) || Platform::passed(deadline)) return std::nullopt;
      freed_.wait(seen, deadline);
    }
  }

  // A slot in which nothing was registered.  Precondition: all writes to it have ended.
  void give_back(uint32_t slot) {
    free_.push(slot);
    freed_.raise();
  }

  // Whether a snapshot of this serial could not be registered any more.
  bool below_floor(uint64_t serial) const { return serial < floor_.load(std::memory_order_acquire); }

  // Registers a snapshot whose content and header are durable; false if the floor has risen above it.
  // `write` makes a superblock durable, or throws std::system_error; then the slot is not the caller's any
  // more either.
  template <class Write>
  bool commit(uint32_t slot, Registered snapshot, Write&& write) {
    const std::lock_guard lock(mutex_);
    Change change = after_snapshot(registry_, slot, snapshot);
    if (!change.registered) {
      give_back(slot);
      return false;
    }
    try {
      write(std::as_const(change.next));
    } catch (...) {
      doubtful_.push_back(slot);
      in_doubt_.store(true, std::memory_order_release);
      try {
        rewrite(write);
      } catch (const std::system_error&) {
        freed_.raise();  // it stays in doubt; whoever waits for a slot tries again
      }
      throw;
    }
    adopt(std::move(change));
    return true;
  }

  // Frees what lies below `serial`; false if that changes nothing.
  template <class Write>
  bool release_before(uint64_t serial, Write&& write) {
    const std::lock_guard lock(mutex_);
    return make(after_agreement(registry_, serial), write);
  }

  // Frees what `serial` has; false if that is nothing.
  template <class Write>
  bool discard(uint64_t serial, Write&& write) {
    const std::lock_guard lock(mutex_);
    return make(after_discard(registry_, serial), write);
  }

  // Writes the superblock once more if slots are in doubt, so that they are free.
  template <class Write>
  bool settle(Write&& write) {
    if (!in_doubt_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    if (!doubtful_.empty()) rewrite(write);
    return true;
  }

  // Nobody waits for a slot any more.
  void stop() {
    stopped_.store(true, std::memory_order_release);
    freed_.raise();
  }

  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  Registry registry() const {
    const std::lock_guard lock(mutex_);
    return registry_;
  }
  uint32_t free_slots() const { return free_.size(); }

 private:
  // Precondition: mutex_.
  template <class Write>
  bool make(Change change, Write& write) {
    if (!change.registered) return false;
    write(std::as_const(change.next));
    adopt(std::move(change));
    return true;
  }

  // The superblock as it was, with a newer epoch.  Precondition: mutex_.
  template <class Write>
  void rewrite(Write& write) {
    Change change{registry_, {}, true};
    change.next.epoch++;
    write(std::as_const(change.next));
    adopt(std::move(change));
  }

  // `change.next` is durable.  Precondition: mutex_.
  void adopt(Change change) {
    registry_ = std::move(change.next);
    floor_.store(registry_.floor, std::memory_order_release);
    for (const uint32_t slot : change.freed) give_back(slot);
    for (const uint32_t slot : doubtful_) give_back(slot);
    doubtful_.clear();
    in_doubt_.store(false, std::memory_order_release);
  }

  IndexRing<Platform> free_;
  typename Platform::Event freed_;
  mutable
      typename Platform::Mutex mutex_;  // held while a superblock is written: commits come one after another
  Registry registry_;                   // durable
  std::vector<uint32_t> doubtful_;
  typename Platform::template Atomic<uint64_t> floor_;  // registry_'s, to be read without the lock
  typename Platform::template Atomic<uint64_t> next_sequence_;
  typename Platform::template Atomic<bool> in_doubt_{false};
  typename Platform::template Atomic<bool> stopped_{false};
};

}  // namespace understudy::persistence
