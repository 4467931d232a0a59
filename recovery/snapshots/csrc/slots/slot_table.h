// Who may write which slot.  A slot is in exactly one place: in the queue (free), with a snapshot being
// written, in the registry, left, or in doubt.
//
// Left: the superblock that was written last does not name it, and one that a crash may leave still does.  It
// is free once that last superblock is durable.  Of the two places for superblocks one always has a durable
// one, and the next is written into the other, so that whatever a crash leaves of it, one of both counts.
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

#include "recovery/snapshots/csrc/format/commit_rule.h"
#include "recovery/snapshots/csrc/slots/index_ring.h"

namespace understudy::persistence {

template <class Platform>
class SlotTable {
 public:
  // `last_sequence`: no snapshot that lies anywhere in the store has a larger one.  `lazy`: commit() writes
  // superblocks that the next sync makes durable; else it makes them so itself.
  SlotTable(Registry registry, uint64_t last_sequence, bool lazy)
      : free_(static_cast<uint32_t>(registry.slots.size())),
        lazy_(lazy),
        registry_(std::move(registry)),
        durable_epoch_(registry_.epoch),
        floor_(registry_.floor),
        next_sequence_(last_sequence + 1) {
    for (uint32_t slot = 0; slot < registry_.slots.size(); slot++)
      if (registry_.slots[slot].sequence == 0) free_.push(slot);
  }

  uint64_t last_sequence() const { return next_sequence_.load(std::memory_order_relaxed) - 1; }
  // Rises with each call.  To be asked once a slot is had.
  uint64_t next_sequence() { return next_sequence_.fetch_add(1, std::memory_order_relaxed); }

  // A slot to write, or none at the deadline or after stop().  Where only slots are to be had that are left
  // or in doubt, it settles them; `write` as in commit().
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

  // A slot in which this one was not registered.  Precondition: all writes to it have ended.
  void give_back(uint32_t slot, uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    registry_.slots[slot].serial = sequence;
    give_back(slot);
  }

  // Whether a snapshot of this serial could not be registered any more.
  bool below_floor(uint64_t serial) const { return serial < floor_.load(std::memory_order_acquire); }

  // Registers a snapshot whose content and header are durable; false if the floor has risen above it.
  // `write` writes a superblock, and makes it durable if it is told to, or throws std::system_error; then the
  // slot is not the caller's any more either.
  template <class Write>
  bool commit(uint32_t slot, Registered snapshot, Write&& write) {
    const std::lock_guard lock(mutex_);
    Change change = after_snapshot(registry_, slot, snapshot);
    if (!change.registered) {
      registry_.slots[slot].serial = snapshot.sequence;
      give_back(slot);
      return false;
    }
    try {
      put(change, write, !lazy_);
    } catch (...) {
      doubtful_.push_back(slot);
      unsettled_.store(true, std::memory_order_release);
      try {
        rewrite(write);
      } catch (const std::system_error&) {
        freed_.raise();  // it stays in doubt; whoever waits for a slot tries again
      }
      throw;
    }
    adopt(std::move(change), !lazy_);
    return true;
  }

  // To be asked before a sync, for made_durable().
  uint64_t written() const {
    const std::lock_guard lock(mutex_);
    return written_;
  }

  // A sync of everything has succeeded, and none has failed since the superblock was written that was the
  // last when `written` was the answer of written().
  void made_durable(uint64_t written) {
    const std::lock_guard lock(mutex_);
    // If another one was begun meanwhile, it is in that one's place, and nobody knows what a crash leaves
    // there.
    if (written == written_ && whole_) settle_left();
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

  // Writes the superblock once more, durably, if slots are left or in doubt, so that they are free.
  template <class Write>
  bool settle(Write&& write) {
    if (!unsettled_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    if (!doubtful_.empty() || !left_.empty()) rewrite(write);
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
  // Those that are left among them: a superblock more, and they are free.
  uint32_t free_slots() const {
    const std::lock_guard lock(mutex_);
    return free_.size() + static_cast<uint32_t>(left_.size());
  }

 private:
  // Precondition: mutex_.
  template <class Write>
  bool make(Change change, Write& write) {
    if (!change.registered) return false;
    put(change, write, true);
    adopt(std::move(change), true);
    return true;
  }

  // Writes the superblock that `change` makes.  Precondition: mutex_.
  template <class Write>
  void put(Change& change, Write& write, bool durable) {
    change.next.epoch = registry_.epoch + 1;
    if (change.next.epoch % 2 == durable_epoch_ % 2) change.next.epoch++;  // not over the durable one
    written_++;
    whole_ = false;
    write(std::as_const(change.next), durable);
    whole_ = true;
  }

  // The superblock as it was, with a newer epoch, durably.  Precondition: mutex_.
  template <class Write>
  void rewrite(Write& write) {
    Change change{registry_, {}, true};
    put(change, write, true);
    adopt(std::move(change), true);
  }

  // `change.next` is written.  Precondition: mutex_.
  void adopt(Change change, bool durable) {
    registry_ = std::move(change.next);
    floor_.store(registry_.floor, std::memory_order_release);
    left_.insert(left_.end(), change.freed.begin(), change.freed.end());
    left_.insert(left_.end(), doubtful_.begin(), doubtful_.end());
    doubtful_.clear();
    unsettled_.store(!left_.empty(), std::memory_order_release);
    if (durable) settle_left();
  }

  // registry_ is durable.  Precondition: mutex_.
  void settle_left() {
    durable_epoch_ = registry_.epoch;
    for (const uint32_t slot : left_) give_back(slot);
    left_.clear();
    unsettled_.store(!doubtful_.empty(), std::memory_order_release);
  }

  void give_back(uint32_t slot) {
    free_.push(slot);
    freed_.raise();
  }

  IndexRing<Platform> free_;
  typename Platform::Event freed_;
  // Held while a superblock is written: commits come one after another.
  mutable typename Platform::Mutex mutex_;
  const bool lazy_;
  Registry registry_;  // written
  uint64_t durable_epoch_;
  uint64_t written_ = 0;  // superblocks that were begun
  bool whole_ = true;     // the last of these was written
  std::vector<uint32_t> left_, doubtful_;
  typename Platform::template Atomic<uint64_t> floor_;  // registry_'s, to be read without the lock
  typename Platform::template Atomic<uint64_t> next_sequence_;
  typename Platform::template Atomic<bool> unsettled_{false};
  typename Platform::template Atomic<bool> stopped_{false};
};

}  // namespace understudy::persistence
