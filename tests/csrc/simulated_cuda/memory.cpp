#include "tests/csrc/simulated_cuda/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "tests/csrc/simulated_cuda/settings.h"

namespace understudy::simulated {
namespace {

constexpr uint64_t kUnit = 512;
constexpr uint64_t kAddresses = 2;  // times the bytes: holes between blocks cost a GPU no memory, but pages
constexpr int kPoison = 0xFB;       // of floating point a small negative number, of indices far outside

}  // namespace

Memory::Memory(uint64_t bytes)
    : bytes_(bytes), room_(settings().shared != nullptr ? settings().shared : "", bytes) {
  const int file = memfd_create("simulated-cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(kAddresses * bytes)) != 0)
    throw std::runtime_error("the simulated CUDA device has no memory");
  const auto map = [&](int protection) {
    void* const at = mmap(nullptr, kAddresses * bytes, protection, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) throw std::runtime_error("the simulated CUDA device's memory cannot be mapped");
    return static_cast<uint8_t*>(at);
  };
  device_ = map(PROT_NONE);
  kernels_ = map(PROT_READ | PROT_WRITE);
  close(file);
  free_[0] = kAddresses * bytes / kUnit * kUnit;
}

void* Memory::take(uint64_t bytes) {
  const uint64_t whole = std::max(kUnit, (bytes + kUnit - 1) / kUnit * kUnit);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto room =
      std::find_if(free_.begin(), free_.end(), [&](const auto& f) { return f.second >= whole; });
  if (whole < bytes || counts_.bytes + whole > bytes_ || room == free_.end() || !room_.take(whole))
    return nullptr;
  const auto [offset, length] = *room;
  free_.erase(room);
  if (length > whole) free_[offset + whole] = length - whole;
  used_[offset] = whole;
  counts_.blocks++, counts_.taken_blocks++;
  counts_.bytes += whole, counts_.taken_bytes += whole;
  counts_.most_blocks = std::max(counts_.most_blocks, counts_.blocks);
  counts_.most_bytes = std::max(counts_.most_bytes, counts_.bytes);
  std::memset(kernels_ + offset, kPoison, whole);
  return device_ + offset;
}

void Memory::poison(void* address, uint64_t bytes) { std::memset(for_kernels(address), kPoison, bytes); }

void Memory::give_back(void* address) {
  uint64_t offset = static_cast<uint64_t>(static_cast<uint8_t*>(address) - device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(offset);
  if (used == used_.end()) throw std::logic_error("memory of the simulated CUDA device was given back twice");
  uint64_t length = used->second;
  used_.erase(used);
  counts_.blocks--, counts_.bytes -= length;
  room_.give_back(length);
  std::memset(kernels_ + offset, kPoison, length);
  auto behind = free_.lower_bound(offset);
  if (behind != free_.end() && behind->first == offset + length) {
    length += behind->second;
    behind = free_.erase(behind);
  }
  if (behind != free_.begin()) {
    const auto before = std::prev(behind);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  free_[offset] = length;
}

bool Memory::holds(const void* address) const {
  return address >= device_ && static_cast<const uint8_t*>(address) < device_ + kAddresses * bytes_;
}

void* Memory::for_kernels(const void* address) const {
  if (address == nullptr) return nullptr;
  if (!holds(address)) throw std::logic_error("this is no address of the simulated CUDA device");
  return kernels_ + (static_cast<const uint8_t*>(address) - device_);
}

Memory::Counts Memory::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

void Memory::forget_most() {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_.most_blocks = counts_.blocks, counts_.most_bytes = counts_.bytes;
}

void Memory::forget_taken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_.taken_blocks = counts_.taken_bytes = 0;
}

}  // namespace understudy::simulated
