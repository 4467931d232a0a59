// Which virtual devices exist, and which one the calling thread uses.
#pragma once
#include <c10/core/Device.h>

#include <string>

namespace understudy::client {

inline constexpr int kMaxDevices = 64;

// Number of virtual devices: UNDERSTUDY_DEVICE_COUNT, filtered by CUDA_VISIBLE_DEVICES. Read once, at first
// use, as CUDA does.
c10::DeviceIndex device_count() noexcept;

// The daemon's number of a device that the script calls `index`.
int physical_index(c10::DeviceIndex index);

c10::DeviceIndex current_device() noexcept;
// Makes `index` current in this thread and returns the previous one; raises if there is no such device.
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
void set_current_device_unchecked(c10::DeviceIndex index) noexcept;
// `device` with its index filled in; raises if there is no such device.
c10::Device resolve_device(c10::Device device);

class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex index) : previous_(exchange_device(index)) {}
  ~DeviceScope() { set_current_device_unchecked(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// What executes on the other side: "cpu" or "cuda", and its cuDNN as 91900, or 0. The client decides as that
// driver would.
void set_driver(const std::string& name, int64_t its_cudnn_version);
int64_t cudnn_version() noexcept;
bool driver_is_cpu() noexcept;

}  // namespace understudy::client
