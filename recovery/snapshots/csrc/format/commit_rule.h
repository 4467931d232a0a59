// Which snapshots a store keeps: pure rules.
//
// A store keeps what any agreement between ranks may still come to: everything from the floor on.  The floor
// is a serial, and rises when a newer snapshot is complete on all ranks.  The newest snapshot always stays.
//
// A snapshot's age is its serial.  Its sequence is the order in which snapshots got their places: of
// two under way at once the older one may have been the last, and they may end in any order.
#pragma once
#include <cstdint>
#include <vector>

#include "recovery/snapshots/csrc/format/store_format.h"

namespace understudy::persistence {

// What a superblock says.  A slot whose sequence is 0 is free or being written; its serial is then the
// sequence of the last snapshot of that slot whose fate was known: a header there with a larger one is newer
// than this superblock.
struct Registry {
  uint64_t epoch = 0;
  uint64_t latest_sequence = 0;  // of those registered; 0: there is none
  uint32_t latest_slot = 0;
  uint64_t floor = 0;
  std::vector<Registered> slots;
};

// What becomes of a registry, but for its epoch.  `freed` slots are free once `next` is durable.
struct Change {
  Registry next;
  std::vector<uint32_t> freed;
  bool registered = false;  // false: nothing is to be written
};

// Of two with the same serial, the newer is the one that was asked for last.
inline bool is_newer(const Registered& a, const Registered& b) {
  return a.serial != b.serial ? a.serial > b.serial : a.sequence > b.sequence;
}

// Takes out what goes, and finds the latest of what stays.
template <class Goes>
void take_out(Change& change, Goes goes) {
  Registry& next = change.next;
  next.latest_sequence = 0;
  for (uint32_t slot = 0; slot < next.slots.size(); slot++) {
    Registered& r = next.slots[slot];
    if (r.sequence == 0) continue;
    if (goes(r)) {
      change.freed.push_back(slot);
      r = {0, r.sequence};
    } else if (r.sequence > next.latest_sequence) {
      next.latest_sequence = r.sequence;
      next.latest_slot = slot;
    }
  }
}

// Takes out what lies below the floor, but for the newest.
inline void take_out_released(Change& change) {
  Registered newest;
  for (const Registered& r : change.next.slots)
    if (r.sequence != 0 && (newest.sequence == 0 || is_newer(r, newest))) newest = r;
  take_out(change, [floor = change.next.floor, newest](const Registered& r) {
    return r.serial < floor && r.sequence != newest.sequence;
  });
}

// A snapshot is whole in `slot`.  Not registered: the floor has risen above it.
inline Change after_snapshot(const Registry& now, uint32_t slot, Registered snapshot) {
  Change change{now, {}, snapshot.serial >= now.floor};
  if (!change.registered) return change;
  change.next.slots[slot] = snapshot;
  take_out_released(change);
  return change;
}

// All ranks have `serial` whole.
inline Change after_agreement(const Registry& now, uint64_t serial) {
  Change change{now, {}, serial > now.floor};
  if (!change.registered) return change;
  change.next.floor = serial;
  take_out_released(change);
  return change;
}

// `serial` will never be whole on all ranks.
inline Change after_discard(const Registry& now, uint64_t serial) {
  Change change{now, {}, false};
  take_out(change, [serial](const Registered& r) { return r.serial == serial; });
  change.registered = !change.freed.empty();
  return change;
}

}  // namespace understudy::persistence
