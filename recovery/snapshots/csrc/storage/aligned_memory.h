// Memory as direct I/O needs it.
//
// Large memory asks for huge pages: with them the kernel makes requests of megabytes, else of at most so many
// scattered pages, and a virtual disk moved twice as many bytes in a second.  It works without them, too.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace understudy::persistence {

struct FreeMemory {
  void* mapped = nullptr;  // none: it comes from the heap
  uint64_t bytes = 0;

  void operator()(uint8_t* memory) const {
    if (mapped == nullptr)
      std::free(memory);
    else
      munmap(mapped, bytes);
  }
};
using AlignedMemory = std::unique_ptr<uint8_t[], FreeMemory>;

// At a multiple of 4096.  `bytes` is rounded up to blocks; the content is anything.
inline AlignedMemory aligned_memory(uint64_t bytes) {
  constexpr uint64_t kPage = 4096, kHugePage = 2 << 20;
  if (bytes < kHugePage) {
    const uint64_t size = (bytes + kPage - 1) / kPage * kPage;
    auto* const memory = static_cast<uint8_t*>(std::aligned_alloc(kPage, size == 0 ? kPage : size));
    if (memory == nullptr) throw std::bad_alloc();
    return AlignedMemory(memory);
  }
  // Not from the heap, whose memory may have been used before, in small pages.
  if (bytes > UINT64_MAX - 2 * kHugePage) throw std::bad_alloc();
  const uint64_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;  // to align in
  void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  madvise(mapped, size, MADV_HUGEPAGE);
  const uint64_t begin = reinterpret_cast<uintptr_t>(mapped);
  const uint64_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  return AlignedMemory(static_cast<uint8_t*>(mapped) + (aligned - begin), FreeMemory{mapped, size});
}

}  // namespace understudy::persistence
