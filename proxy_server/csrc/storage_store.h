// What the rewind rules (replay/csrc/rewind.h) keep contents in.
#pragma once
#include <c10/core/Storage.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "proxy_server/csrc/content.h"
#include "proxy_server/csrc/driver.h"

namespace understudy::server {

// Keeps contents for the rewind rules; storages of pre-images are used again (a fresh page costs more than a
// copy), by size. Sizes that nobody asks for again are given up whenever the pool has doubled.
class StorageStore {
 public:
  explicit StorageStore(const Driver& driver) : driver_(driver) {}
  c10::Storage copy(const c10::Storage& from);  // throws replay::NoRoom
  // Until the next finish_copies() a GPU makes none: it then makes all of them at once.
  void gather_copies() { gathers_ = !driver_.device().is_cpu(); }
  void finish_copies() {
    if (std::exchange(gathers_, false)) make_gathered();
  }
  c10::Storage hollow(const c10::Storage& from) const;
  void recycle(Content&& content);
  static uint64_t bytes(const Content& content) { return content.nbytes(); }
  void clear() { pool_.clear(), pooled_bytes_ = 0; }
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
  std::unordered_map<uint64_t, Spare> pool_;
  uint64_t pooled_bytes_ = 0;
  bool gathers_ = false;
  std::vector<std::pair<c10::Storage, c10::Storage>> gathered_;  // to, from
  uint64_t sweep_bytes_ = kFirstSweepBytes;
  size_t sweep_sizes_ = kFirstSweepSizes;
};

}  // namespace understudy::server
