#include "proxy_client/csrc/virtual_memory.h"

#include <sys/mman.h>

#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "proxy_client/csrc/device.h"
#include "proxy_client/csrc/session.h"
#include "proxy_client/csrc/statistics.h"

namespace understudy::client {
namespace {

constexpr size_t kRangeBytes = size_t{1} << 42;  // 4 TiB of addresses, no memory
constexpr size_t kGranularity = 512;             // as CUDA's caching allocator

std::atomic<int64_t> allocated{0}, peak{0};

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Eight size classes per power of two: freed addresses are found again although sizes vary.
size_t size_class(size_t bytes) {
  const size_t rounded = round_up(bytes, kGranularity);
  return round_up(rounded, std::max(kGranularity, std::bit_floor(rounded) / 8));
}

class AddressRange {
 public:
  char* take(Buffer& owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!base_) reserve();
    auto& free = free_[owner.block_bytes];
    char* address;
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK(used_ + owner.block_bytes <= kRangeBytes,
                  "the virtual address range of the device is exhausted");
      address = base_ + used_;
      used_ += owner.block_bytes;
    }
    owners_[address] = &owner;
    return address;
  }

  void give_back(char* address, size_t block_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    owners_[address] = nullptr;
    free_[block_bytes].push_back(address);
  }

  Location find(char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = owners_.upper_bound(address);
    TORCH_CHECK(block != owners_.begin(), "a cuda tensor points outside the virtual device's memory");
    --block;
    const Buffer* owner = block->second;
    TORCH_CHECK(owner && address < block->first + owner->block_bytes,
                "a cuda tensor points to virtual device memory that was freed or never allocated");
    return {owner->handle, static_cast<size_t>(address - block->first)};
  }

 private:
  void reserve() {
    void* range = mmap(nullptr, kRangeBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "cannot reserve 4 TiB of addresses for the virtual device");
    base_ = static_cast<char*>(range);
  }

  std::mutex mutex_;  // innermost: nothing is appended to the log under it
  char* base_ = nullptr;
  size_t used_ = 0;
  std::unordered_map<size_t, std::vector<char*>> free_;
  std::map<char*, Buffer*> owners_;  // blocks are never merged, so it grows only when one is carved
};

AddressRange& addresses() {
  static AddressRange& range = *std::make_unique<AddressRange>().release();  // outlives every storage
  return range;
}

void delete_buffer(void* context) {
  const std::unique_ptr<Buffer> buffer(static_cast<Buffer*>(context));
  if (in_bad_fork()) return;  // another thread of the parent may have held a lock when it forked
  if (buffer->address) {
    addresses().give_back(static_cast<char*>(buffer->address), buffer->block_bytes);
    allocated.fetch_sub(static_cast<int64_t>(round_up(buffer->bytes, kGranularity)),
                        std::memory_order_relaxed);
  }
  if (buffer->handle == 0) return;
  try {
    if (LogWriter* log = log_if_open()) log->free_later(buffer->handle);
  } catch (const std::exception&) {
    // The session is lost; the next call says so. There is nobody here to tell.
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    LogWriter& log = log_for(device);
    const uint64_t handle = new_handles();
    append_word(log, Kind::kAllocate, handle, bytes);
    count(&Statistics::allocations);
    return make_data_pointer(bytes, device, handle);
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "device memory cannot be copied by the host");
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::DataPtr make_data_pointer(size_t bytes, c10::DeviceIndex device, uint64_t handle) {
  auto buffer = std::make_unique<Buffer>();
  buffer->handle = handle;
  buffer->bytes = bytes;
  if (bytes != 0) {
    buffer->block_bytes = size_class(bytes);
    buffer->address = addresses().take(*buffer);
    const auto rounded = static_cast<int64_t>(round_up(bytes, kGranularity));
    const int64_t now = allocated.fetch_add(rounded, std::memory_order_relaxed) + rounded;
    if (now > peak.load(std::memory_order_relaxed)) peak.store(now, std::memory_order_relaxed);
  }
  void* address = buffer->address;
  return {address, buffer.release(), &delete_buffer, c10::Device(c10::kCUDA, device)};
}

Buffer* buffer_of(const c10::StorageImpl& storage) noexcept {
  const c10::DataPtr& data = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_buffer ? static_cast<Buffer*>(data.get_context()) : nullptr;
}

Location locate(const c10::StorageImpl& storage) {
  if (const Buffer* buffer = buffer_of(storage)) return {buffer->handle, 0};
  return addresses().find(
      static_cast<char*>(const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get()));
}

void resize_storage(c10::StorageImpl& storage, size_t bytes, bool record) {
  Buffer* buffer = buffer_of(storage);
  TORCH_CHECK(buffer, "a storage that the virtual device did not make cannot be resized");
  const c10::DeviceIndex device = storage.device().index();
  if (record) append_word(log_for(device), Kind::kResize, buffer->handle, bytes);
  const uint64_t handle = std::exchange(buffer->handle, 0);
  storage.set_data_ptr_noswap(make_data_pointer(bytes, device, handle));
  storage.set_nbytes(bytes);
}

int64_t allocated_bytes() noexcept { return allocated.load(std::memory_order_relaxed); }
int64_t peak_allocated_bytes() noexcept { return peak.load(std::memory_order_relaxed); }
void reset_peak_allocated_bytes() noexcept { peak.store(allocated_bytes(), std::memory_order_relaxed); }

}  // namespace understudy::client
