#include "proxy_client/csrc/device/pinned_memory.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace understudy::client {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kInvalidValue = 1, kAlreadyRegistered = 712, kNotRegistered = 713;  // cudaError_t

struct PinnedBlocks {
  std::mutex mutex;
  std::map<const char*, size_t> bytes;
  std::map<const char*, size_t> registered;
};

bool contains(const std::map<const char*, size_t>& blocks, const char* byte) {
  auto block = blocks.upper_bound(byte);
  if (block == blocks.begin()) return false;
  --block;
  return byte < block->first + block->second;
}

PinnedBlocks& blocks() {
  static PinnedBlocks& instance = *std::make_unique<PinnedBlocks>().release();  // outlives every tensor
  return instance;
}

void release(void* address) {
  {
    std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().bytes.erase(static_cast<const char*>(address));
  }
  std::free(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    if (bytes != 0) {
      TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&address, kAlignment, bytes) == 0, "cannot allocate ",
                       bytes, " bytes of host memory");
      std::lock_guard<std::mutex> lock(blocks().mutex);
      blocks().bytes[static_cast<const char*>(address)] = bytes;
    }
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const auto* byte = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(blocks().mutex);
  return contains(blocks().bytes, byte) || contains(blocks().registered, byte);
}

int register_host_memory(uintptr_t address, size_t bytes) {
  if (address == 0 || bytes == 0) return kInvalidValue;
  const auto* begin = reinterpret_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(blocks().mutex);
  if (contains(blocks().registered, begin)) return kAlreadyRegistered;
  blocks().registered[begin] = bytes;
  return 0;
}

int unregister_host_memory(uintptr_t address) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  return blocks().registered.erase(reinterpret_cast<const char*>(address)) == 0 ? kNotRegistered : 0;
}

}  // namespace understudy::client
