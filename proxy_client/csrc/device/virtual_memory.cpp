#include "proxy_client/csrc/device/virtual_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/host_access.h"
#include "proxy_client/csrc/device/memory_statistics.h"
#include "proxy_client/csrc/device/streams.h"
#include "proxy_client/csrc/session.h"
#include "proxy_client/csrc/statistics.h"
#include "replay/csrc/log/quick_lock.h"

namespace understudy::client {
namespace {

using replay::QuickLock;

constexpr size_t kRangeBytes = size_t{1} << 42;  // 4 TiB of addresses, no memory
constexpr size_t kLeastBytes = size_t{1} << 34;  // where there is no room for that (limits, valgrind)
constexpr size_t kGranularity = 512;             // as CUDA's caching allocator

// Class n of n <= 8 holds blocks of n units of 512 bytes (0: no address at all); above, there are eight
// classes per power of two, so that freed addresses are found again although sizes vary.
constexpr uint32_t kClassesPerPower = 8;
constexpr uint32_t kSizeClasses = 8 * 34;

uint32_t size_class(size_t bytes) {
  const size_t units = (bytes + kGranularity - 1) / kGranularity;
  if (units <= kClassesPerPower) return static_cast<uint32_t>(units);
  const auto shift =
      static_cast<uint32_t>(std::bit_width(units)) - 4;              // eight steps from one power to the next
  const size_t steps = (units + (size_t{1} << shift) - 1) >> shift;  // 8 to 16
  return kClassesPerPower * shift + static_cast<uint32_t>(steps);
}

size_t class_bytes(uint32_t size_class) {
  if (size_class <= kClassesPerPower) return size_class * kGranularity;
  const uint32_t shift = (size_class - 1) / kClassesPerPower - 1;
  return static_cast<size_t>(size_class - kClassesPerPower * shift) << shift << 9;
}
static_assert(kGranularity == 1 << 9);

constexpr uint64_t kRoomUnasked = 1ull << 30;  // what any device has

class AddressRange {
 public:
  Buffer* take(size_t bytes, uint64_t handle) {
    const uint32_t index = size_class(bytes);
    TORCH_CHECK(index < kSizeClasses, "a buffer of ", bytes, " bytes does not fit the virtual device");
    std::lock_guard<QuickLock> lock(lock_);
    Buffer* buffer = free_[index];
    if (buffer) {
      free_[index] = buffer->next_free;
    } else {
      buffer = carve(index);
    }
    buffer->handle = handle;
    buffer->bytes = bytes;
    buffer->in_use = true;
    alive_.fetch_add(bytes, std::memory_order_relaxed);
    return buffer;
  }

  bool has_room(size_t bytes) const noexcept {
    return bytes <= room_.load(std::memory_order_relaxed) &&
           alive_.load(std::memory_order_relaxed) <= room_.load(std::memory_order_relaxed) - bytes;
  }
  // For what is alive now, and so much more.
  void set_room(uint64_t more) noexcept {
    room_.store(alive_.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  void give_back(Buffer* buffer) noexcept {
    std::lock_guard<QuickLock> lock(lock_);
    buffer->in_use = false;
    alive_.fetch_sub(buffer->bytes, std::memory_order_relaxed);
    buffer->next_free = free_[buffer->size_class];
    free_[buffer->size_class] = buffer;
  }

  Location find(const char* address) {
    std::lock_guard<QuickLock> lock(lock_);
    const auto behind = std::upper_bound(
        blocks_.begin(), blocks_.end(), address,
        [](const char* wanted, const std::unique_ptr<Buffer>& block) { return wanted < block->address; });
    TORCH_CHECK(behind != blocks_.begin(), "a cuda tensor points outside the virtual device's memory");
    const Buffer& block = **std::prev(behind);
    TORCH_CHECK(block.in_use && address < block.address + class_bytes(block.size_class),
                "a cuda tensor points to virtual device memory that was freed or never allocated");
    return {block.handle, static_cast<size_t>(address - block.address)};
  }

  // Carved so far: bounded by the largest number that were ever in use at once.
  size_t blocks() {
    std::lock_guard<QuickLock> lock(lock_);
    return blocks_.size() + empty_blocks_.size();
  }

 private:
  Buffer* carve(uint32_t index) {
    auto fresh = std::make_unique<Buffer>();
    fresh->size_class = index;
    if (index == 0) return empty_blocks_.emplace_back(std::move(fresh)).get();
    if (!base_) reserve();
    const size_t bytes = class_bytes(index);
    TORCH_CHECK(used_ + bytes <= bytes_, "the virtual address range of the device is exhausted");
    fresh->address = base_ + used_;
    used_ += bytes;
    return blocks_.emplace_back(std::move(fresh)).get();
  }

  void reserve() {
    for (bytes_ = kRangeBytes; bytes_ >= kLeastBytes; bytes_ /= 2) {
      void* range = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (range == MAP_FAILED) continue;
      base_ = static_cast<char*>(range);
      watch_host_access(range, bytes_);
      return;
    }
    TORCH_CHECK(false,
                "cannot reserve even 16 GiB of addresses for the virtual device; is there a limit on "
                "address space (ulimit -v)?");
  }

  std::atomic<uint64_t> alive_{0}, room_{kRoomUnasked};  // bytes
  QuickLock lock_;                                       // innermost: nothing is appended to the log under it
  char* base_ = nullptr;
  size_t bytes_ = 0, used_ = 0;
  std::array<Buffer*, kSizeClasses> free_{};
  std::vector<std::unique_ptr<Buffer>> blocks_;        // by address
  std::vector<std::unique_ptr<Buffer>> empty_blocks_;  // of size class 0
};

AddressRange& addresses() {
  static AddressRange& range = *std::make_unique<AddressRange>().release();  // outlives every storage
  return range;
}

void delete_buffer(void* context) {
  if (in_bad_fork()) return;  // another thread of the parent may have held a lock when it forked
  auto* buffer = static_cast<Buffer*>(context);
  const uint64_t handle = buffer->handle;
  addresses().give_back(buffer);
  if (handle == 0) return;
  try {
    if (LogWriter* log = log_if_open()) log->free_later(handle);
  } catch (const std::exception&) {
    // The session is lost; the next call says so. There is nobody here to tell.
  }
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    LogWriter& log = log_for(device);
    need_room(bytes, device);
    const uint64_t handle = new_handles();
    append_word(log, Kind::kAllocate, handle, bytes);
    count(&Statistics::allocations);
    return make_data_pointer(bytes, device, handle);
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "device memory cannot be copied by the host");
  }

  // torch.accelerator asks here; torch.cuda comes to the same numbers through py_module.cpp.
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { query_memory(replay::MemoryQuery::kEmptyCache); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_in_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return device_statistics(query_memory(replay::MemoryQuery::kRead));
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    query_memory(replay::MemoryQuery::kResetAccumulated);
  }
  void resetPeakStats(c10::DeviceIndex) override { query_memory(replay::MemoryQuery::kResetPeak); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    log_for(resolve_device({c10::kCUDA, device}).index());  // cudaMemGetInfo makes a context, too
    const auto memory = query_memory(replay::MemoryQuery::kRead);
    return {memory.free_bytes, memory.total_bytes};
  }
};

std::string in_words(uint64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  auto number = static_cast<double>(bytes);
  for (; number >= 1024 && unit < 4; unit++) number /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", number, kUnits[unit]);
  return text;
}

// The device server is asked only where what is alive comes near what it had free when it was last asked.
void ask_for_room(size_t bytes, c10::DeviceIndex device) {
  if (!log_if_open()) return;
  auto memory = query_memory(replay::MemoryQuery::kRead);
  if (memory.free_bytes < bytes) memory = query_memory(replay::MemoryQuery::kEmptyCache);
  if (memory.free_bytes < bytes) {
    std::ostringstream message;
    message << "CUDA out of memory. Tried to allocate " << in_words(bytes) << ". GPU "
            << static_cast<int>(device) << " has a total capacity of " << in_words(memory.total_bytes)
            << " of which " << in_words(memory.free_bytes) << " is free. Of the allocated memory "
            << in_words(memory.bytes.current) << " is allocated by PyTorch.";
    C10_THROW_ERROR(OutOfMemoryError, message.str());
  }
  addresses().set_room(std::max<uint64_t>(bytes, memory.free_bytes / 10 * 9));
}

}  // namespace

void need_room(size_t bytes, c10::DeviceIndex device) {
  if (C10_UNLIKELY(!addresses().has_room(bytes))) ask_for_room(bytes, device);
}

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::DataPtr make_data_pointer(size_t bytes, c10::DeviceIndex device, uint64_t handle) {
  Buffer* buffer = addresses().take(bytes, handle);
  return {buffer->address, buffer, &delete_buffer, c10::Device(c10::kCUDA, device)};
}

Buffer* buffer_of(const c10::StorageImpl& storage) noexcept {
  return buffer_of(const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks());
}

Buffer* buffer_of(const c10::DataPtr& data) noexcept {
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
  if (record) {
    need_room(bytes, device);
    append_word(log_for(device), Kind::kResize, buffer->handle, bytes);
  }
  const uint64_t handle = std::exchange(buffer->handle, 0);
  storage.set_data_ptr_noswap(make_data_pointer(bytes, device, handle));
  storage.set_nbytes(bytes);
}

size_t address_blocks() { return addresses().blocks(); }

}  // namespace understudy::client
