// Devices, streams and events for PyTorch's generic code.
//
// A session has one order of records, so streams are numbers that keep it: what is appended later runs later.
// An event is therefore always "recorded", and waiting for one inside the device needs nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <memory>

#include "proxy_client/csrc/device.h"
#include "proxy_client/csrc/session.h"
#include "replay/csrc/futex.h"

namespace understudy::client {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};
std::atomic<c10::StreamId> next_stream{1};

struct Event {
  uint64_t recorded_at_ns = 0;
  uint64_t next_record = 0;  // when it was recorded
};

Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, Device(c10::kCUDA, device), id);
}
DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device(); }

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = c10::kCUDA;

  c10::DeviceType type() const override { return c10::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Device getDevice() const override { return {c10::kCUDA, current_device()}; }
  Device exchangeDevice(Device device) const override {
    return {c10::kCUDA, exchange_device(index_of(device))};
  }
  void setDevice(Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override {
    set_current_device_unchecked(device.index());
  }

  Stream getStream(Device device) const override {
    const DeviceIndex index = index_of(device);
    return stream_of(index, current_stream.at(static_cast<size_t>(index)));
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return stream_of(index_of(device), next_stream++);
  }
  Stream exchangeStream(Stream stream) const override {
    const DeviceIndex index = stream.device_index();
    return stream_of(index, std::exchange(current_stream.at(static_cast<size_t>(index)), stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { synchronize(replay::WaitFor::kStream); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize(); }

  // An event that may be asked for times waits for the device, so that elapsed_time() measures the device and
  // not how fast the worker appends. Other events cost nothing.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = std::make_unique<Event>().release();
    if (flag == c10::EventFlag::BACKEND_DEFAULT) synchronize(replay::WaitFor::kStream);
    static_cast<Event*>(*event)->recorded_at_ns = replay::now_ns();
    static_cast<Event*>(*event)->next_record = next_record();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    const std::unique_ptr<Event> owned(static_cast<Event*>(event));
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for_records_before(static_cast<Event*>(event)->next_record);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    const auto at = [](void* event) {
      return static_cast<double>(static_cast<Event*>(event)->recorded_at_ns);
    };
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    return (at(end) - at(begin)) / 1e6;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

}  // namespace
}  // namespace understudy::client
