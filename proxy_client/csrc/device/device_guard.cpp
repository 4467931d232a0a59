// Devices, streams and events for PyTorch's generic code.
//
// A session has one order of records. While a script has made no stream, what is appended later runs later,
// and to wait for an event inside the device needs nothing; from then on records tell of streams and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/streams.h"
#include "proxy_client/csrc/session.h"
#include "replay/csrc/log/futex.h"

namespace understudy::client {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Event {
  uint64_t recorded_at_ns = 0;
  uint64_t next_record = 0;  // when it was recorded
  uint64_t stream = 0, mark = 0;
  bool of_stream = true;  // its end; else that of a collective
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

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return new_stream(index_of(device), high_priority);
  }
  Stream getNewStream(Device device, int priority) const override {
    return new_stream(index_of(device), priority < 0);
  }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    return has_passed_all(static_cast<uint64_t>(stream.id()));
  }
  void synchronizeStream(const Stream& stream) const override {
    if (!streams_in_use()) return synchronize(replay::WaitFor::kStream);
    const uint64_t mark = mark_stream(stream);
    wait_for_records_before(next_record(), static_cast<uint64_t>(stream.id()), mark);
  }
  void synchronizeDevice(const DeviceIndex) const override { synchronize(); }

  // An event that may be asked for times waits for the device, so that elapsed_time() measures the device and
  // not how fast the worker appends. Other events cost nothing.
  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag flag) const override {
    if (!*event) *event = std::make_unique<Event>().release();
    if (flag == c10::EventFlag::BACKEND_DEFAULT) synchronizeStream(stream);
    const uint64_t of_work = recorded_at(), mark = of_work != 0 ? of_work : mark_stream(stream);
    *static_cast<Event*>(*event) = {replay::now_ns(), next_record(), static_cast<uint64_t>(stream.id()), mark,
                                    of_work == 0};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    const std::unique_ptr<Event> owned(static_cast<Event*>(event));
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    const Event& recorded = *static_cast<Event*>(event);
    if (!recorded.of_stream || recorded.stream != static_cast<uint64_t>(stream.id()))
      wait_in_stream(stream, recorded.mark);
  }
  bool queryEvent(void* event) const override {
    return !event || has_passed(static_cast<Event*>(event)->next_record, static_cast<Event*>(event)->stream);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const Event& recorded = *static_cast<Event*>(event);
    if (!recorded.of_stream) return synchronize(replay::WaitFor::kMark, recorded.mark);
    wait_for_records_before(recorded.next_record, recorded.stream, recorded.mark);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    use_in_stream(data, stream);
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
