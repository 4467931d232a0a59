#include "proxy_server/csrc/driver/kept_blocks.h"

#include <cstdlib>

namespace understudy::server {
namespace {

thread_local KeptBlocks* of_this_thread = nullptr;

}  // namespace

KeptBlocks::KeptBlocks() { of_this_thread = this; }

KeptBlocks::~KeptBlocks() {
  of_this_thread = nullptr;
  give_back();
}

void KeptBlocks::give_back() {
  for (Size& size : sizes_)
    while (size.count != 0) std::free(size.blocks[--size.count]);
}

void KeptBlocks::drop() {
  if (of_this_thread != nullptr) of_this_thread->give_back();
}

// Who frees a block says only where it lies, so there is a function for each size.
template <size_t size>
void KeptBlocks::put(void* block) {
  if (KeptBlocks* const here = of_this_thread; here != nullptr && here->sizes_[size].count < kMost)
    here->sizes_[size].blocks[here->sizes_[size].count++] = block;
  else
    std::free(block);
}

KeptBlocks::Block KeptBlocks::take(size_t bytes) {
  KeptBlocks* const here = of_this_thread;
  if (here == nullptr || bytes == 0 || bytes > kStep * kSizes) return {};
  static constexpr auto kPutters = putters(std::make_index_sequence<kSizes>());
  const size_t size = (bytes - 1) / kStep;
  Size& kept = here->sizes_[size];
  if (kept.count != 0) return {kept.blocks[--kept.count], kPutters[size]};
  return {std::aligned_alloc(kStep, (size + 1) * kStep), kPutters[size]};
}

}  // namespace understudy::server
