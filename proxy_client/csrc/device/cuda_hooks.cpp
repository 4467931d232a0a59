// What PyTorch asks "CUDA" about outside the dispatcher. Must be registered before torch._C initialises,
// because at::detail::getCUDAHooks() is cached then. A CUDA build of PyTorch registers its own of each:
// priorities decide, and never loading order.
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/generators.h"
#include "proxy_client/csrc/device/pinned_memory.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "proxy_client/csrc/session.h"

namespace at {
namespace {

namespace client = understudy::client;

class VirtualCudaHooks final : public CUDAHooksInterface {
 public:
  explicit VirtualCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return client::device_count() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return client::log_if_open() != nullptr; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "  - understudy: virtual CUDA devices\n"; }

  // Where PyTorch chooses between cuDNN's operators and its own above the dispatcher: batch normalisation,
  // grid samplers. Convolutions are chosen by the device.
  bool hasCuDNN() const override { return client::cudnn_version() > 0; }
  bool compiledWithCuDNN() const override { return client::cudnn_version() > 0; }
  long versionCuDNN() const override { return static_cast<long>(client::cudnn_version()); }
  long versionRuntimeCuDNN() const override { return static_cast<long>(client::cudnn_version()); }
  double batchnormMinEpsilonCuDNN() const override { return 0; }  // CUDNN_BN_MIN_EPSILON since cuDNN 7.5

  int getNumGPUs() const override { return client::device_count(); }
  DeviceIndex deviceCount() const override { return client::device_count(); }
  DeviceIndex current_device() const override { return client::current_device(); }
  DeviceIndex getCurrentDevice() const override { return client::current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { client::exchange_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return client::exchange_device(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? DeviceIndex{-1} : client::exchange_device(index);
  }
  void deviceSynchronize(DeviceIndex) const override { client::synchronize(); }

  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return client::default_generator(index);
  }
  Generator getNewGenerator(DeviceIndex index) const override { return client::new_generator(index); }

  Device getDeviceFromPtr(void*) const override { return {kCUDA, client::bound_device()}; }
  bool isPinnedPtr(const void* address) const override { return client::is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override { return client::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return client::device_allocator(); }
};

// PyTorch looks the class up by this name.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED,
                                       VirtualCudaHooks)

constexpr uint8_t kAboveBuiltIn = 1;

struct AllocatorRegistration {
  AllocatorRegistration() { c10::SetAllocator(c10::kCUDA, client::device_allocator(), kAboveBuiltIn); }
} const allocator_registration;

}  // namespace
}  // namespace at

namespace c10d {
namespace {

// DDP's reducer times its phases; host times will do.
class VirtualCudaTimer final : public Timer {
 public:
  explicit VirtualCudaTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from == kUnsetTime || to == kUnsetTime) return std::nullopt;
    return to - from;
  }
};

C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, VirtualCudaTimer)

}  // namespace
}  // namespace c10d
