// torch.profiler and emit_nvtx on the virtual device. There is no CUPTI here, so the profiler times operators
// by events of its own around each: these wait for the device, and a profiled run is therefore slower.
#include <torch/csrc/profiler/stubs/base.h>

#include <memory>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/session.h"
#include "replay/csrc/log/futex.h"

namespace understudy::client {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

class VirtualProfilerEvents final : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    if (device) *device = current_device();
    client::synchronize();
    const uint64_t now = replay::now_ns();
    *event = std::make_shared<uint64_t>(now);
    if (cpu_ns) *cpu_ns = static_cast<int64_t>(now);
  }
  // Microseconds.
  float elapsed(const ProfilerVoidEventStub* begin, const ProfilerVoidEventStub* end) const override {
    const auto at = [](const ProfilerVoidEventStub* event) {
      return static_cast<double>(*static_cast<const uint64_t*>(event->get()));
    };
    return static_cast<float>((at(end) - at(begin)) / 1e3);
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override { op(bound_device()); }
  void synchronize() const override { client::synchronize(); }
};

struct Registration {
  Registration() {
    static VirtualProfilerEvents events;
    torch::profiler::impl::registerCUDAMethods(&events);
  }
} const registration;

}  // namespace
}  // namespace understudy::client
