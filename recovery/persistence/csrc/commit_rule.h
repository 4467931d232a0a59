// Which snapshots a store keeps: pure rules.
//
// A snapshot gets its sequence when it is asked for, and may end in another order.  One that ends late is not
// registered over a newer one (the counter of Listing 1 in "PCcheck", ASPLOS 2025).  A store of a single
// rank keeps the latest.  One of a rank among others keeps what any agreement may still come to: everything
// from the floor on, which rises when a newer snapshot is complete on all ranks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "recovery/persistence/csrc/store_format.h"

namespace understudy::persistence {

// What a superblock says.  A slot whose sequence is 0 is free or being written.
struct Registry {
  uint64_t epoch = 0;
  uint64_t latest_sequence = 0;  // 0: no snapshot yet
  uint32_t latest_slot = 0;
  uint64_t floor = 0;
  std::vector<Registered> slots;
};

// What becomes of a registry.  `freed` slots are free once `next` is durable.
struct Change {
  Registry next;
  std::vector<uint32_t> freed;
  bool registered = false;  // false: nothing is to be written
};

// Takes out what `next` need not keep.  The latest always stays.
inline void drop_unneeded(Change& change, bool agreed) {
  Registry& next = change.next;
  for (uint32_t slot = 0; slot < next.slots.size(); slot++) {
    Registered& r = next.slots[slot];
    if (r.sequence == 0 || slot == next.latest_slot || (agreed && r.serial >= next.floor)) continue;
    change.freed.push_back(slot);
    r = {};
  }
}

// A snapshot is whole in `slot`.  Not registered: a newer one made it superfluous.
inline Change after_snapshot(const Registry& now, bool agreed, uint32_t slot, Registered snapshot) {
  Change change{now, {}, false};
  if (agreed ? snapshot.serial < now.floor : snapshot.sequence < now.latest_sequence) return change;
  change.registered = true;
  change.next.epoch++;
  change.next.slots[slot] = snapshot;
  if (snapshot.sequence > now.latest_sequence) {
    change.next.latest_sequence = snapshot.sequence;
    change.next.latest_slot = slot;
    if (!agreed) change.next.floor = snapshot.serial;
  }
  drop_unneeded(change, agreed);
  return change;
}

// All ranks have `serial` whole.
inline Change after_agreement(const Registry& now, uint64_t serial) {
  Change change{now, {}, serial > now.floor};
  if (!change.registered) return change;
  change.next.epoch++;
  change.next.floor = serial;
  drop_unneeded(change, true);
  return change;
}

// `serial` will never be whole on all ranks.
inline Change after_discard(const Registry& now, uint64_t serial) {
  Change change{now, {}, false};
  Registry& next = change.next;
  next.latest_sequence = 0;
  for (uint32_t slot = 0; slot < next.slots.size(); slot++) {
    Registered& r = next.slots[slot];
    if (r.sequence != 0 && r.serial == serial) {
      change.registered = true;
      change.freed.push_back(slot);
      r = {};
    }
    if (r.sequence > next.latest_sequence) {
      next.latest_sequence = r.sequence;
      next.latest_slot = slot;
    }
  }
  next.epoch++;
  return change;
}

}  // namespace understudy::persistence
