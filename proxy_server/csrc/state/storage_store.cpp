#include "proxy_server/csrc/state/storage_store.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "replay/csrc/rewind/rewind.h"

namespace understudy::server {
namespace {

constexpr uint64_t kPoolBytes = 2ull << 30;  // of pre-image storages kept for reuse

}  // namespace

c10::Storage StorageStore::copy(const c10::Storage& from) {
  auto it = pool_.find(from.nbytes());
  if (it == pool_.end() || from.nbytes() == 0) return fresh_copy(from);
  it->second.wanted = true;
  if (it->second.storages.empty()) return fresh_copy(from);
  c10::Storage to = std::move(it->second.storages.back());
  it->second.storages.pop_back();
  pooled_bytes_ -= to.nbytes();
  std::memcpy(to.mutable_data(), from.data(), from.nbytes());
  return to;
}

c10::Storage StorageStore::fresh_copy(const c10::Storage& from) {
  try {
    if (!from.device().is_cuda() || from.nbytes() == 0) return driver_.duplicate(from);
    const c10::StreamGuard beside(driver_.streams().for_copies());
    const auto place = arena_.take(from.nbytes());
    c10::Storage to = place ? *place : driver_.allocate(from.nbytes());
    if (gathers_) {
      gathered_.emplace_back(to, from);
    } else {
      bytes_of(to, 0, to.nbytes()).copy_(bytes_of(from, 0, from.nbytes()));
      driver_.streams().copied();
    }
    return to;
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    arena_.keep_away();
    static std::once_flag told;
    std::call_once(told, [this, &from] {
      std::fprintf(
          stderr,
          "understudy: %s has no memory for a copy of %llu bytes as they are at the last commit. The "
          "program goes on; a fault before the next commit cannot be undone in place, and needs a "
          "replica or a snapshot. It is said only once\n",
          driver_.device().str().c_str(), static_cast<unsigned long long>(from.nbytes()));
    });
    throw replay::NoRoom(e.what_without_backtrace());
  }
}

// One launch for many copies, in words where there are whole ones, as wide as its loads get.
void StorageStore::make_gathered() {
  const auto gathered = std::exchange(gathered_, {});
  if (gathered.empty()) return;
  const c10::StreamGuard beside(driver_.streams().for_copies());
  std::vector<at::Tensor> to, from;
  const auto copy_those = [&](bool in_words) {
    to.clear(), from.clear();
    for (const auto& [copy, original] : gathered) {
      if ((original.nbytes() % sizeof(int64_t) == 0) != in_words) continue;
      const at::ScalarType type = in_words ? at::kLong : at::kByte;
      to.push_back(bytes_of(copy, 0, copy.nbytes()).view(type));
      from.push_back(bytes_of(original, 0, original.nbytes()).view(type));
    }
    if (!to.empty()) at::_foreach_copy_(to, from);
  };
  copy_those(true), copy_those(false);
  driver_.streams().copied();
}

// The program's contents stay out of the arena: they would be there for good, amid what comes and goes.
void StorageStore::bring_back(Content& now, Content&& kept) {
  if (!PreimageArena::holds(kept)) {
    std::swap(now, kept);
    return recycle(std::move(kept));
  }
  const c10::Storage from = kept.release();
  const c10::Storage& to = now.storage();
  if (to.device() == from.device() && to.nbytes() == from.nbytes() && to.data() != nullptr)
    bytes_of(to, 0, to.nbytes()).copy_(bytes_of(from, 0, from.nbytes()));
  else
    now = driver_.duplicate(from);
}

void StorageStore::at_commit() {
  arena_.device_passed();
  arena_.adjust();
}

bool StorageStore::give_up_idle_arena() {
  arena_.keep_away();
  return arena_.give_up();
}

void StorageStore::give_up_arena() {
  if (arena_.bytes() == 0) return;
  driver_.synchronize();
  arena_.device_passed();
  arena_.give_up();
}

c10::Storage StorageStore::hollow(const c10::Storage& from) const {
  return c10::Storage(c10::Storage::use_byte_size_t(), from.nbytes(), c10::DataPtr(nullptr, driver_.device()),
                      nullptr, false);
}

void StorageStore::recycle(Content&& content) {
  c10::Storage storage = content.release();
  if (!driver_.device().is_cpu() || storage.use_count() != 1 || storage.data() == nullptr) return;
  if (pooled_bytes_ > sweep_bytes_ || pool_.size() > sweep_sizes_) sweep();
  if (pooled_bytes_ + storage.nbytes() > kPoolBytes) return;
  pooled_bytes_ += storage.nbytes();
  pool_[storage.nbytes()].storages.push_back(std::move(storage));
}

// Shapes that never come back would fill the pool for good.
void StorageStore::sweep() {
  for (auto at = pool_.begin(); at != pool_.end();) {
    if (std::exchange(at->second.wanted, false)) {
      ++at;
    } else {
      pooled_bytes_ -= at->first * at->second.storages.size();
      at = pool_.erase(at);
    }
  }
  sweep_bytes_ = std::max(kFirstSweepBytes, 2 * pooled_bytes_);
  sweep_sizes_ = std::max(kFirstSweepSizes, 2 * pool_.size());
}

}  // namespace understudy::server
