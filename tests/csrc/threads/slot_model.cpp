// The real SlotTable, IndexRing and rule of commits, in every order of their atomic steps.
// docs/snapshot-format.md says what must hold; a line for each scenario says how much was tried, and the exit
// status whether all held.
#include "tests/csrc/threads/interleavings.h"
#include "recovery/snapshots/csrc/slots/slot_table.h"
#include "recovery/snapshots/csrc/storage/storage.h"

using namespace understudy::persistence;

namespace {

struct Scenario {
  const char* name;
  uint32_t slots, persists;
  bool each_releases;  // whoever has persisted a snapshot releases those before it; else somebody else does
  uint32_t failures;   // superblocks that may fail, whenever
  bool lazy = false;   // superblocks become durable with the next snapshot's sync
};

// What lies in a slot: the sequence whose snapshot is being written or whole there.
struct Content {
  uint64_t sequence = 0;
  bool whole = false;
};

struct Acknowledged {
  uint32_t slot;
  Registered snapshot;
};

class Store final : public model::Program {
 public:
  Store(const Scenario& scenario, model::Run& run)
      : scenario_(scenario), content_(scenario.slots), held_(scenario.slots), left_(scenario.failures) {
    Registry first;
    first.slots.resize(scenario.slots);
    // One snapshot is there already, as there would be after a while.
    first.latest_sequence = 1;
    first.slots[0] = {1, 1};
    content_[0] = {1, true};
    places_[0].durable = first;
    table_.emplace(first, 1, scenario.lazy);
    for (uint32_t i = 0; i < scenario.persists; i++)
      run.add([this, i] {
        if (persist(i + 2) && scenario_.each_releases)
          while (!release(i + 2)) {
          }
      });
    if (!scenario.each_releases) run.add([this] { release(2); });
  }

  std::string wrong() const override {
    if (!wrong_.empty()) return wrong_;
    for (const Registry* one : places_[0].after_crash())
      for (const Registry* other : places_[1].after_crash()) {
        const Registry* const counts = newer(one, other);
        if (counts == nullptr) return "no superblock counts";
        if (std::string found = wrong_superblock(*counts); !found.empty()) return found;
      }
    return "";
  }

  std::string wrong_end() override {
    uint32_t registered = 0;
    for (const Registered& r : table_->registry().slots) registered += r.sequence != 0;
    if (scenario_.each_releases && registered != 1) return "what was released stays";
    left_ = 0;
    const auto settle = [this](const Registry& next, bool synced) { write(next, synced); };
    table_->settle(settle);
    if (!wrong_.empty()) return wrong_;
    std::vector<bool> seen(scenario_.slots);
    for (uint32_t free = table_->free_slots(); free != 0; free--) {
      const std::optional<uint32_t> slot = table_->acquire(kNever, settle);
      if (!slot || seen[*slot]) return "a slot is in the queue twice";
      if (durable().slots[*slot].sequence != 0) return "a slot that is registered is in the queue";
      seen[*slot] = true;
      registered++;
    }
    return registered == scenario_.slots ? "" : "a slot was lost";
  }

 private:
  static constexpr uint64_t kNever = UINT64_MAX;

  // Where every other superblock lies.
  struct Place {
    std::optional<Registry> durable;
    std::vector<Registry> attempted;  // since then; one of them may lie there, or a part of it

    std::vector<const Registry*> after_crash() const {
      std::vector<const Registry*> found;
      if (durable) found.push_back(&*durable);
      for (const Registry& one : attempted) found.push_back(&one);
      if (!durable || !attempted.empty()) found.push_back(nullptr);
      return found;
    }
  };

  static const Registry* newer(const Registry* one, const Registry* other) {
    if (one == nullptr || other == nullptr) return one == nullptr ? other : one;
    return one->epoch > other->epoch ? one : other;
  }

  // What a crash cannot take.  Precondition: wrong() was empty.
  const Registry& durable() const {
    const auto certain = [](const Place& place) {
      return place.durable && place.attempted.empty() ? &*place.durable : nullptr;
    };
    return *newer(certain(places_[0]), certain(places_[1]));
  }

  // Whatever of these a crash leaves: all that it registers must be whole.
  std::string wrong_superblock(const Registry& registry) const {
    for (size_t slot = 0; slot < registry.slots.size(); slot++) {
      const uint64_t sequence = registry.slots[slot].sequence;
      if (sequence != 0 && (content_[slot].sequence != sequence || !content_[slot].whole))
        return "slot " + std::to_string(slot) + " is registered and not whole";
      if (sequence > registry.latest_sequence) return "the latest is not the latest";
      const uint64_t serial = registry.slots[slot].serial;
      if (sequence != 0 && serial < registry.floor && serial < newest(registry))
        return "what was released stays";
    }
    for (const Acknowledged& a : acknowledged_)
      if (a.snapshot.serial >= floor_ && !finds(registry, a)) return "what was acknowledged is not found";
    return registry.slots[registry.latest_slot].sequence == registry.latest_sequence
               ? ""
               : "the latest is nowhere";
  }

  static uint64_t newest(const Registry& registry) {
    uint64_t serial = 0;
    for (const Registered& r : registry.slots)
      if (r.sequence != 0) serial = std::max(serial, r.serial);
    return serial;
  }

  // Of an acknowledged one: this superblock names it, or its header is newer and counts.
  bool finds(const Registry& registry, const Acknowledged& a) const {
    const Registered& row = registry.slots[a.slot];
    if (row.sequence != 0) return row.sequence == a.snapshot.sequence;
    return scenario_.lazy && row.serial < a.snapshot.sequence &&
           content_[a.slot].sequence == a.snapshot.sequence && content_[a.slot].whole;
  }

  void must(bool holds, const char* sentence) {
    if (!holds && wrong_.empty()) wrong_ = sentence;
  }

  bool persist(uint64_t serial) {
    const auto write = [this](const Registry& next, bool synced) { this->write(next, synced); };
    std::optional<uint32_t> slot;
    try {
      slot = table_->acquire(kNever, write);
    } catch (const StorageError&) {
      return false;
    }
    must(slot.has_value() && !held_[*slot], "a slot was handed out twice");
    held_[*slot] = true;
    const uint64_t sequence = table_->next_sequence();
    content_[*slot] = {sequence, false};
    model::Run::current()->yield();
    sync();
    content_[*slot].whole = true;
    held_[*slot] = false;  // the table's from here on
    try {
      const bool registered = table_->commit(*slot, {sequence, serial}, write);
      must(scenario_.lazy || !registered || durable().slots[*slot].sequence == sequence,
           "what was acknowledged is durable");
      if (registered) acknowledged_.push_back({*slot, {sequence, serial}});
      must(registered || durable().floor > serial, "only what lies below the floor is dropped");
      return registered;
    } catch (const StorageError&) {
      return false;
    }
  }

  bool release(uint64_t serial) {
    floor_ = std::max(floor_, serial);
    try {
      table_->release_before(serial, [this](const Registry& next, bool synced) { write(next, synced); });
      must(durable().floor >= serial, "what was released is durable");
      return true;
    } catch (const StorageError&) {
      return false;
    }
  }

  // Makes durable what was written before.
  void sync() {
    if (!scenario_.lazy) return;
    const uint64_t written = table_->written();
    const uint64_t begun = begun_;
    const bool whole = whole_;
    model::Run::current()->yield();
    if (begun == begun_ && whole) make_durable(last_);
    table_->made_durable(written);
  }

  void make_durable(size_t place) {
    if (places_[place].attempted.empty()) return;
    places_[place].durable = places_[place].attempted.back();
    places_[place].attempted.clear();
  }

  // Writes a superblock, and makes it durable if asked to, or fails and leaves it unknown whether it is.
  void write(const Registry& next, bool synced) {
    const Registry before = durable();
    begun_++;
    last_ = next.epoch % 2;
    whole_ = false;
    places_[last_].attempted.push_back(next);  // it may be on the disk from here on
    const bool fails = left_ != 0 && model::Run::current()->choose(2) == 1;
    if (left_ == 0) model::Run::current()->yield();
    if (fails) {
      left_--;
      throw StorageError(5, "the superblock");
    }
    must(newest(next) >= newest(before), "the newest never goes back");
    must(scenario_.lazy || next.epoch == before.epoch + 1, "epochs follow each other");
    must(next.floor >= before.floor, "the floor never falls");
    whole_ = true;
    if (!synced) return;
    make_durable(last_);
  }

  const Scenario scenario_;
  std::vector<Content> content_;
  std::vector<bool> held_;
  uint32_t left_;
  std::array<Place, 2> places_;
  uint64_t begun_ = 0;  // superblocks
  bool whole_ = true;   // the last one was written
  size_t last_ = 0;     // its place
  std::vector<Acknowledged> acknowledged_;
  uint64_t floor_ = 0;  // that somebody asked for
  std::string wrong_;
  std::optional<SlotTable<model::ModelPlatform>> table_;
};

// Numbers that go round: in no order is one with two threads, or lost.
class Ring final : public model::Program {
 public:
  Ring(uint32_t numbers, uint32_t threads, uint32_t rounds, model::Run& run)
      : numbers_(numbers), ring_(numbers), held_(numbers) {
    for (uint32_t i = 0; i < numbers; i++) ring_.push(i);
    for (uint32_t t = 0; t < threads; t++)
      run.add([this, rounds] {
        for (uint32_t i = 0; i < rounds; i++) {
          uint32_t number = 0;
          if (!ring_.pop(number)) continue;
          if (number >= numbers_ || held_[number]) wrong_ = "a number is with two threads";
          held_[number] = true;
          model::Run::current()->yield();
          held_[number] = false;
          ring_.push(number);
        }
      });
  }
  std::string wrong() const override { return wrong_; }
  std::string wrong_end() override { return ring_.size() == numbers_ ? wrong_ : "a number was lost"; }

 private:
  const uint32_t numbers_;
  IndexRing<model::ModelPlatform> ring_;
  std::vector<bool> held_;
  std::string wrong_;
};

bool report(const std::string& name, const model::Explored& found) {
  std::printf("%s: %llu states, %llu steps, %.3g interleavings, %llu ends%s%s\n", name.c_str(),
              static_cast<unsigned long long>(found.states), static_cast<unsigned long long>(found.steps),
              found.interleavings, static_cast<unsigned long long>(found.ends),
              found.violation.empty() ? "" : "; VIOLATION: ", found.violation.c_str());
  std::fflush(stdout);
  return found.violation.empty();
}

}  // namespace

int main(int count, char** arguments) {
  const std::string only = count > 1 ? arguments[1] : "";
  bool good = true;
  const auto wanted = [&](const std::string& name) { return only.empty() || only == name; };
  for (const auto& [numbers, threads, rounds] :
       {std::array{1u, 2u, 2u}, {2u, 2u, 2u}, {2u, 3u, 1u}, {3u, 3u, 1u}}) {
    const std::string name = "ring-" + std::to_string(numbers) + "-" + std::to_string(threads);
    if (!wanted(name)) continue;
    good &= report(name, model::Explorer([=](model::Run& run) {
                           return std::make_unique<Ring>(numbers, threads, rounds, run);
                         }).explore());
  }
  const Scenario scenarios[] = {
      {"each-releases-2-2", 2, 2, true, 0},
      {"each-releases-3-2", 3, 2, true, 0},
      {"each-releases-2-2-failing", 2, 2, true, 2},
      {"each-releases-3-2-failing", 3, 2, true, 2},
      {"other-releases-3-2", 3, 2, false, 0},
      {"other-releases-3-2-failing", 3, 2, false, 1},
      {"each-releases-2-3", 2, 3, true, 0},
      {"each-releases-3-3", 3, 3, true, 0},
      {"other-releases-4-3", 4, 3, false, 0},
      {"lazy-each-releases-2-2", 2, 2, true, 0, true},
      {"lazy-each-releases-3-2", 3, 2, true, 0, true},
      {"lazy-each-releases-3-2-failing", 3, 2, true, 1, true},
      {"lazy-other-releases-3-2-failing", 3, 2, false, 1, true},
      {"lazy-each-releases-2-3", 2, 3, true, 0, true},
  };
  for (const Scenario& scenario : scenarios) {
    if (!wanted(scenario.name)) continue;
    good &= report(scenario.name, model::Explorer([&](model::Run& run) {
                                    return std::make_unique<Store>(scenario, run);
                                  }).explore());
  }
  return good ? 0 : 1;
}
