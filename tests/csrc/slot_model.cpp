// The real SlotTable, IndexRing and rule of commits, in every order of their atomic steps.
// docs/snapshot-format.md says what must hold; a line for each scenario says how much was tried, and the exit
// status whether all held.
#include "interleavings.h"
#include "recovery/persistence/csrc/slot_table.h"
#include "recovery/persistence/csrc/storage.h"

using namespace understudy::persistence;

namespace {

struct Scenario {
  const char* name;
  uint32_t slots, persists;
  bool each_releases;  // whoever has persisted a snapshot releases those before it; else somebody else does
  uint32_t failures;   // superblocks that may fail, whenever
};

// What lies in a slot: the sequence whose snapshot is being written or whole there.
struct Content {
  uint64_t sequence = 0;
  bool whole = false;
};

class Store final : public model::Program {
 public:
  Store(const Scenario& scenario, model::Run& run)
      : scenario_(scenario), content_(scenario.slots), held_(scenario.slots), left_(scenario.failures) {
    durable_.slots.resize(scenario.slots);
    // One snapshot is there already, as there would be after a while.
    durable_.latest_sequence = 1;
    durable_.slots[0] = {1, 1};
    content_[0] = {1, true};
    table_.emplace(durable_, 1);
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
    if (std::string found = wrong_superblock(durable_); !found.empty()) return found;
    for (const Registry& attempted : attempted_)
      if (std::string found = wrong_superblock(attempted); !found.empty()) return found;
    return "";
  }

  std::string wrong_end() override {
    uint32_t registered = 0;
    for (const Registered& r : table_->registry().slots) registered += r.sequence != 0;
    if (scenario_.each_releases && registered != 1) return "what was released stays";
    left_ = 0;
    const auto settle = [this](const Registry& next) { write(next); };
    table_->settle(settle);
    if (!wrong_.empty()) return wrong_;
    std::vector<bool> seen(scenario_.slots);
    for (uint32_t free = table_->free_slots(); free != 0; free--) {
      const std::optional<uint32_t> slot = table_->acquire(kNever, settle);
      if (!slot || seen[*slot]) return "a slot is in the queue twice";
      if (durable_.slots[*slot].sequence != 0) return "a slot that is registered is in the queue";
      seen[*slot] = true;
      registered++;
    }
    return registered == scenario_.slots ? "" : "a slot was lost";
  }

 private:
  static constexpr uint64_t kNever = UINT64_MAX;

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
    return registry.slots[registry.latest_slot].sequence == registry.latest_sequence
               ? ""
               : "the latest is nowhere";
  }

  static uint64_t newest(const Registry& registry) {
    uint64_t serial = 0;
    for (const Registered& r : registry.slots) serial = std::max(serial, r.serial);
    return serial;
  }

  void must(bool holds, const char* sentence) {
    if (!holds && wrong_.empty()) wrong_ = sentence;
  }

  bool persist(uint64_t serial) {
    const auto write = [this](const Registry& next) { this->write(next); };
    const uint64_t sequence = table_->next_sequence();
    std::optional<uint32_t> slot;
    try {
      slot = table_->acquire(kNever, write);
    } catch (const StorageError&) {
      return false;
    }
    must(slot.has_value() && !held_[*slot], "a slot was handed out twice");
    held_[*slot] = true;
    content_[*slot] = {sequence, false};
    model::Run::current()->yield();
    content_[*slot].whole = true;
    held_[*slot] = false;  // the table's from here on
    try {
      const bool registered = table_->commit(*slot, {sequence, serial}, write);
      must(!registered || durable_.slots[*slot].sequence == sequence, "what was acknowledged is durable");
      must(registered || durable_.floor > serial, "only what lies below the floor is dropped");
      return registered;
    } catch (const StorageError&) {
      return false;
    }
  }

  bool release(uint64_t serial) {
    try {
      table_->release_before(serial, [this](const Registry& next) { write(next); });
      must(durable_.floor >= serial, "what was released is durable");
      return true;
    } catch (const StorageError&) {
      return false;
    }
  }

  // Makes a superblock durable, or fails and leaves it unknown whether it is.
  void write(const Registry& next) {
    attempted_.push_back(next);  // over the older one; it may be on the disk from here on
    const bool fails = left_ != 0 && model::Run::current()->choose(2) == 1;
    if (left_ == 0) model::Run::current()->yield();
    if (fails) {
      left_--;
      throw StorageError(5, "the superblock");
    }
    must(newest(next) >= newest(durable_), "the newest never goes back");
    must(next.epoch == durable_.epoch + 1, "epochs follow each other");
    must(next.floor >= durable_.floor, "the floor never falls");
    durable_ = next;
    attempted_.clear();
  }

  const Scenario scenario_;
  std::vector<Content> content_;
  std::vector<bool> held_;
  uint32_t left_;
  Registry durable_;
  std::vector<Registry> attempted_;  // one of them may be on the disk instead of the older superblock
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
      {"each-releases-2-2", 2, 2, true, 0},         {"each-releases-3-2", 3, 2, true, 0},
      {"each-releases-2-2-failing", 2, 2, true, 2}, {"each-releases-3-2-failing", 3, 2, true, 2},
      {"other-releases-3-2", 3, 2, false, 0},       {"other-releases-3-2-failing", 3, 2, false, 1},
      {"each-releases-2-3", 2, 3, true, 0},         {"each-releases-3-3", 3, 3, true, 0},
      {"other-releases-4-3", 4, 3, false, 0},
  };
  for (const Scenario& scenario : scenarios) {
    if (!wanted(scenario.name)) continue;
    good &= report(scenario.name, model::Explorer([&](model::Run& run) {
                                    return std::make_unique<Store>(scenario, run);
                                  }).explore());
  }
  return good ? 0 : 1;
}
