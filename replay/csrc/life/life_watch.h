// Waits for the deaths of device servers by the words that they hold in the control pages of their logs: a
// kernel thread per 127 words (futex_waitv takes 128, one is our own), asleep until one changes.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace understudy::replay {

enum class LifeNews : uint8_t {
  kDied,         // no thread of the process runs its program any more
  kDisbelieved,  // the word tells of a death, and the process lives; or it changed too often to be looked at
  kUnwatched,    // the kernel does not wait for it
};

struct LifeNotice {
  uint64_t id;
  LifeNews news;
  uint64_t at_ns;  // CLOCK_MONOTONIC
};

class LifeWatch {
 public:
  // Throws LogError where the kernel has no futex_waitv (before Linux 5.16, or forbidden).
  LifeWatch();
  ~LifeWatch();
  LifeWatch(const LifeWatch&) = delete;
  LifeWatch& operator=(const LifeWatch&) = delete;
  // Readable (poll) when there are notices to take.
  int descriptor() const { return descriptor_; }
  // The word in that log is held, or will be, by this process. Throws LogError.
  uint64_t watch(const std::string& directory, int32_t pid, uint64_t start_ticks);
  void forget(uint64_t id);
  std::vector<LifeNotice> take();

 private:
  struct Word;
  class Waiter;
  void tell(const Word& word, LifeNews news);

  int descriptor_ = -1;
  std::mutex mutex_;  // of the callers
  std::vector<std::unique_ptr<Waiter>> waiters_;
  uint64_t last_id_ = 0;
  std::mutex told_mutex_;
  std::vector<LifeNotice> notices_;
};

}  // namespace understudy::replay
