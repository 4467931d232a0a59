// Small blocks of memory, used again by the thread that frees them.
//
// For a small tensor the heap takes as long as many a kernel: glibc cuts each aligned block out of a larger
// one, and joins the pieces again.
#pragma once
#include <array>
#include <cstddef>
#include <utility>

namespace understudy::server {

// While one lives, its thread keeps the small blocks that it frees: 64 of each size at most, 8 MiB in all.
class KeptBlocks {
 public:
  KeptBlocks();
  ~KeptBlocks();
  KeptBlocks(const KeptBlocks&) = delete;
  KeptBlocks& operator=(const KeptBlocks&) = delete;

  struct Block {
    void* memory = nullptr;  // aligned to kStep; holds whatever it held before
    void (*free)(void*) = nullptr;
  };
  // A block of at least so many bytes. Any thread may free it, at any time. None if the calling thread keeps
  // none, if it is not a small one, or if the heap has no memory.
  static Block take(size_t bytes);
  // Those that the calling thread keeps go back to the heap.
  static void drop();

 private:
  static constexpr size_t kStep = 64;  // bytes; what PyTorch aligns to
  static constexpr size_t kSizes = 64;
  static constexpr size_t kMost = 64;  // blocks of a size

  struct Size {
    size_t count = 0;
    std::array<void*, kMost> blocks;
  };
  template <size_t size>
  static void put(void* block);
  template <size_t... sizes>
  static constexpr auto putters(std::index_sequence<sizes...>) {
    return std::array<void (*)(void*), kSizes>{put<sizes>...};
  }
  void give_back();

  std::array<Size, kSizes> sizes_;
};

}  // namespace understudy::server
