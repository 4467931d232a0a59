// Memory in which every access outside is noticed: nothing is mapped for 4 GiB on either side, and what is
// left of the first page is poisoned for AddressSanitizer.
#pragma once
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace understudy::fuzz {

// Ends the run: what holds for every input did not hold for this one.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

class GuardedMemory {
 public:
  explicit GuardedMemory(uint64_t most) : bytes_((most + kPage - 1) / kPage * kPage) {
    void* all = mmap(nullptr, kGuard + bytes_ + kGuard, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(all != MAP_FAILED, "no address space for guarded memory");
    begin_ = static_cast<uint8_t*>(all) + kGuard;
    require(mprotect(begin_, bytes_, PROT_READ | PROT_WRITE) == 0, "no guarded memory");
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  // The last `bytes` bytes of it, all zero; what came before is given up.
  uint8_t* take(uint64_t bytes) {
    require(bytes % 8 == 0 && bytes <= bytes_, "guarded memory of a wrong size");
    __asan_unpoison_memory_region(begin_, bytes_);
    uint8_t* const taken = begin_ + (bytes_ - bytes);
    std::memset(taken, 0, bytes);
    __asan_poison_memory_region(begin_, bytes_ - bytes);
    return taken;
  }

 private:
  static constexpr uint64_t kPage = 4096, kGuard = 4ull << 30;
  uint64_t bytes_;
  uint8_t* begin_;
};

}  // namespace understudy::fuzz
