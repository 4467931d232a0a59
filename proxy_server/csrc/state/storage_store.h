// What the rewind rules (replay/csrc/rewind/rewind.h) keep contents in.
#pragma once
#include <c10/core/Storage.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/state/content.h"
#include "proxy_server/csrc/state/preimage_arena.h"

namespace understudy::server {

// Keeps contents for the rewind rules. On the CPU storages of pre-images are used again (a fresh page costs
// more than a copy), by size; sizes that nobody asks for again are given up whenever the pool has doubled. On
// a GPU pre-images lie in an arena, as far as that goes.
class StorageStore {
 public:
  explicit StorageStore(const Driver& driver) : driver_(driver), arena_(driver) {}
  c10::Storage copy(const c10::Storage& from);  // throws replay::NoRoom
  // Until the next finish_copies() a GPU makes none: it then makes all of them at once.
  void gather_copies() { gathers_ = !driver_.device().is_cpu(); }
  void finish_copies() {
    if (std::exchange(gathers_, false)) make_gathered();
    driver_.streams().stay_behind_copies();
  }
  c10::Storage hollow(const c10::Storage& from) const;
  void recycle(Content&& content);
  // `now` becomes what was kept of it; what it was is recycled.
  void bring_back(Content& now, Content&& kept);
  static uint64_t bytes(const Content& content) { return content.nbytes(); }
  void clear() { pool_.clear(), pooled_bytes_ = 0; }

  // At a commit, when the device has passed everything and what need not be kept has gone.
  void at_commit();
  // Memory that no pre-image lies in, for the program, which needs it. Whether there was any.
  bool give_up_idle_arena();
  // As far as no pre-image lies in it: the next commits get it again. Waits for the device.
  void give_up_arena();
  uint64_t pooled_bytes() const { return pooled_bytes_; }

 private:
  struct Spare {
    std::vector<c10::Storage> storages;
    bool wanted = false;  // asked for since the last sweep
  };
  c10::Storage fresh_copy(const c10::Storage& from);
  void make_gathered();
  static constexpr uint64_t kFirstSweepBytes = 64 << 20;
  static constexpr size_t kFirstSweepSizes = 1024;
  void sweep();

  const Driver& driver_;
  PreimageArena arena_;
  std::unordered_map<uint64_t, Spare> pool_;
  uint64_t pooled_bytes_ = 0;
  bool gathers_ = false;
  std::vector<std::pair<c10::Storage, c10::Storage>> gathered_;  // to, from
  uint64_t sweep_bytes_ = kFirstSweepBytes;
  size_t sweep_sizes_ = kFirstSweepSizes;
};

}  // namespace understudy::server
