#include "proxy_server/csrc/driver/driver.h"

#include <malloc.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <climits>
#include <cstdlib>
#include <cstring>

#include "proxy_server/csrc/driver/cleared_memory.h"
#include "proxy_server/csrc/driver/kept_blocks.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::server {
namespace {

thread_local const Driver* entered_by_this_thread = nullptr;

constexpr int kLargestHeapBlock =
    32 << 20;  // bytes; the most that glibc takes from the heap and not from mmap

// PyTorch checks `left` and `next` each for itself. Together they say how far behind `next` numbers are taken
// before new ones are made, which must not lie behind the last of them.
void check_mersenne_twister(const uint8_t* state, uint64_t bytes) {
  constexpr uint64_t kLeftAt = 8, kNextAt = 16, kNumbers = 624;
  if (bytes < kNextAt + 8) return;  // PyTorch refuses it
  int32_t left;
  uint64_t next;
  std::memcpy(&left, state + kLeftAt, sizeof left);
  std::memcpy(&next, state + kNextAt, sizeof next);
  TORCH_CHECK(left >= 1 && next <= kNumbers && next + static_cast<uint64_t>(left) <= kNumbers + 1,
              "Invalid mt19937 state");
}

}  // namespace

void keep_freed_memory() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, kLargestHeapBlock);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
}

void touch_memory(uint64_t bytes) {
  constexpr uint64_t kBlock = 64 << 10, kPage = 4096;  // small enough for most gaps in the heap
  std::vector<std::unique_ptr<char, decltype(&std::free)>> blocks;
  for (; bytes >= kBlock; bytes -= kBlock) {
    auto& block = blocks.emplace_back(static_cast<char*>(std::malloc(kBlock)), &std::free);
    if (!block) return;
    for (uint64_t at = 0; at < kBlock; at += kPage) static_cast<volatile char*>(block.get())[at] = 0;
  }
}

Driver::Driver(const std::string& spec) : device_(spec) {
  TORCH_CHECK_VALUE(device_.is_cpu() || device_.is_cuda(), "unknown device '", spec,
                    "': use cpu:N or cuda:N");
  // Tensors know only one CPU; cpu:N would seem to be another, and every result would be copied there.
  if (device_.is_cpu()) {
    device_ = c10::Device(c10::kCPU);
    keep_freed_memory();
    install_clearing_allocator();
  }
  if (device_.is_cuda()) {
    TORCH_CHECK(at::detail::getCUDAHooks().deviceCount() > device_.index(), "there is no ", spec,
                " in this process: the cuda driver needs a GPU and a CUDA build of PyTorch");
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  }
  streams_ = std::make_shared<ScriptStreams>(device_);
}

void Driver::enter_thread() const {
  entered_by_this_thread = this;
  if (device_.is_cuda()) c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
}

void Driver::announce_waiting(bool for_all) const {
  if (!device_.is_cuda() || !before_waiting_ || entered_by_this_thread != this) return;
  if (for_all || !streams_->several()) return before_waiting_([] { return false; });
  c10::Event here(device_.type());
  here.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  before_waiting_([&here] { return here.query(); });
}

c10::Storage Driver::allocate(uint64_t bytes) const { return allocate_on(device_, bytes); }

c10::Storage Driver::allocate_on(c10::Device device, uint64_t bytes) const {
  if (!device.is_cpu())
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device))
        .storage();
  auto* allocator = at::getCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true);
}

// What was allocated and not written may be read, as a whole that is written in parts.
c10::Storage Driver::allocate_cleared(uint64_t bytes) const {
  c10::Storage fresh = allocate(bytes);
  clear(fresh);
  return fresh;
}

void Driver::clear(const c10::Storage& storage) const {
  if (storage.nbytes() == 0) return;
  if (storage.device().is_cpu())
    std::memset(storage.mutable_data(), 0, storage.nbytes());
  else
    bytes_of(storage, 0, storage.nbytes()).zero_();
}

c10::Storage Driver::duplicate(const c10::Storage& from) const {
  c10::Storage to = allocate_on(from.device(), from.nbytes());
  if (from.nbytes() == 0) return to;
  if (from.device().is_cpu())
    std::memcpy(to.mutable_data(), from.data(), from.nbytes());
  else
    bytes_of(to, 0, from.nbytes()).copy_(bytes_of(from, 0, from.nbytes()));
  return to;
}

void Driver::to_host(const c10::Storage& from, uint64_t offset, uint64_t bytes, void* to) const {
  if (bytes == 0) return;
  if (from.device().is_cpu()) {
    std::memcpy(to, static_cast<const uint8_t*>(from.data()) + offset, bytes);
    return;
  }
  announce_waiting();
  at::from_blob(to, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))
      .copy_(bytes_of(from, offset, bytes));
}

void Driver::from_host(const c10::Storage& to, uint64_t offset, uint64_t bytes, const void* from) const {
  copy_from_host(to, offset, bytes, from, /*asynchronous=*/false);
}

// From memory that is not pinned the runtime copies into staging memory of its own before it returns, without
// waiting for the device (cudaMemcpyAsync, "API synchronization behavior").
void Driver::upload(const c10::Storage& to, uint64_t offset, uint64_t bytes, const void* from) const {
  copy_from_host(to, offset, bytes, from, /*asynchronous=*/true);
}

c10::Storage Driver::host_copy(const c10::Storage& from) const {
  c10::Storage to = allocate_on(c10::Device(c10::kCPU), from.nbytes());
  to_host(from, 0, from.nbytes(), to.mutable_data());
  return to;
}

void Driver::copy_from_host(const c10::Storage& to, uint64_t offset, uint64_t bytes, const void* from,
                            bool asynchronous) const {
  if (bytes == 0) return;
  if (to.device().is_cpu()) {
    std::memcpy(static_cast<uint8_t*>(to.mutable_data()) + offset, from, bytes);
    return;
  }
  if (!asynchronous) announce_waiting();
  bytes_of(to, offset, bytes)
      .copy_(at::from_blob(const_cast<void*>(from), {static_cast<int64_t>(bytes)},
                           at::TensorOptions().dtype(at::kByte)),
             asynchronous);
}

std::vector<uint64_t> Driver::take(const std::vector<const c10::Storage*>& digested,
                                   const std::vector<HostCopy>& copies) const {
  if (device_.is_cuda() && !(digested.empty() && copies.empty())) {
    const OnDefaultStream together(*streams_);
    announce_waiting();
    return staging_->take(digested, copies);
  }
  for (const HostCopy& copy : copies)
    if (copy.from->nbytes() != 0) std::memcpy(copy.to, copy.from->data(), copy.from->nbytes());
  std::vector<uint64_t> found;
  found.reserve(digested.size());
  for (const c10::Storage* content : digested)
    found.push_back(replay::content_digest(content->data(), content->nbytes()));
  return found;
}

at::Generator Driver::default_generator() const {
  return device_.is_cpu() ? at::detail::getDefaultCPUGenerator()
                          : at::detail::getCUDAHooks().getDefaultGenerator(device_.index());
}

at::Generator Driver::new_generator() const {
  return device_.is_cpu() ? at::detail::createCPUGenerator()
                          : at::detail::getCUDAHooks().getNewGenerator(device_.index());
}

void Driver::set_state(at::Generator& generator, const uint8_t* from, uint64_t bytes) const {
  at::Tensor state = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  if (bytes != 0) std::memcpy(state.mutable_data_ptr(), from, bytes);
  if (device_.is_cpu()) check_mersenne_twister(state.const_data_ptr<uint8_t>(), bytes);
  generator.set_state(state);
}

void Driver::synchronize() const {
  if (device_.is_cpu()) return;
  announce_waiting(/*for_all=*/true);
  at::detail::getCUDAHooks().deviceSynchronize(device_.index());
}

void Driver::give_back_freed_memory() const {
  if (device_.is_cpu()) {
    KeptBlocks::drop();
    malloc_trim(0);
  } else {
    c10::getDeviceAllocator(device_.type())->emptyCache();
  }
}

}  // namespace understudy::server
