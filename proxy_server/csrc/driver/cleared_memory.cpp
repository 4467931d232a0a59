#include "proxy_server/csrc/driver/cleared_memory.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "proxy_server/csrc/driver/kept_blocks.h"

namespace understudy::server {
namespace {

thread_local bool clears = false;

class ClearingAllocator final : public c10::Allocator {
 public:
  explicit ClearingAllocator(c10::Allocator& below) : below_(below) {}
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = any_memory(bytes);
    if (__builtin_expect(clears, 0) && bytes != 0) std::memset(memory.get(), 0, bytes);
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return below_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    below_.copy_data(to, from, bytes);
  }

 private:
  c10::DataPtr any_memory(size_t bytes) {
    if (const auto [block, free] = KeptBlocks::take(bytes); block != nullptr)
      return {block, block, free, c10::Device(c10::kCPU)};
    return below_.allocate(bytes);
  }

  c10::Allocator& below_;
};

}  // namespace

void install_clearing_allocator() {
  static ClearingAllocator allocator(*c10::GetCPUAllocator());
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

ClearedMemory::ClearedMemory(bool wanted) : before_(clears) { clears = wanted || before_; }
ClearedMemory::~ClearedMemory() { clears = before_; }

}  // namespace understudy::server
