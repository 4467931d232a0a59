#include "proxy_client/csrc/device/device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>
#include <vector>

namespace understudy::client {
namespace {

thread_local c10::DeviceIndex current = 0;
std::atomic<bool> cpu_driver{true};
std::atomic<int64_t> of_cudnn{0};

int environment_count() {
  const char* text = std::getenv("UNDERSTUDY_DEVICE_COUNT");
  return text ? std::clamp(std::atoi(text), 0, kMaxDevices) : 1;
}

// CUDA_VISIBLE_DEVICES is a list of numbers, of which everything behind the first invalid one is ignored, and
// everything if one comes twice.
// UUIDs name devices of a driver that the worker does not have: then nothing is filtered.
std::vector<int> read_visible_devices() {
  const int count = environment_count();
  std::vector<int> all;
  for (int i = 0; i < count; i++) all.push_back(i);
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return all;
  std::vector<int> visible;
  std::stringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    char* end = nullptr;
    const long number = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str()) return all;
    if (number < 0 || number >= count) break;
    if (std::find(visible.begin(), visible.end(), number) != visible.end()) return {};
    visible.push_back(static_cast<int>(number));
  }
  return visible;
}

const std::vector<int>& visible_devices() {
  static const std::vector<int> devices = read_visible_devices();
  return devices;
}

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(),
              "CUDA error: invalid device ordinal: there is no cuda:", static_cast<int>(index),
              ", this worker sees ", static_cast<int>(device_count()),
              " device(s); for more ranks start proxyd with more (--devices KIND:COUNT)");
}

}  // namespace

c10::DeviceIndex device_count() noexcept { return static_cast<c10::DeviceIndex>(visible_devices().size()); }

int physical_index(c10::DeviceIndex index) {
  check_index(index);
  return visible_devices()[static_cast<size_t>(index)];
}

c10::DeviceIndex current_device() noexcept { return current; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  if (index != current) check_index(index);
  return std::exchange(current, index);
}

void set_current_device_unchecked(c10::DeviceIndex index) noexcept {
  if (index >= 0) current = index;
}

c10::Device resolve_device(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : current;
  check_index(index);
  return {c10::kCUDA, index};
}

void set_driver(const std::string& name, int64_t its_cudnn_version) {
  cpu_driver = name != "cuda";
  of_cudnn = its_cudnn_version;
}
int64_t cudnn_version() noexcept { return of_cudnn.load(std::memory_order_relaxed); }
bool driver_is_cpu() noexcept { return cpu_driver.load(std::memory_order_relaxed); }

}  // namespace understudy::client
