#include "proxy_client/csrc/device/streams.h"

#include <array>
#include <atomic>
#include <utility>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "proxy_client/csrc/session.h"

namespace understudy::client {
namespace {

thread_local std::array<c10::StreamId, kMaxDevices> streams_of_thread{};
thread_local uint64_t mark_of_events = 0;
std::atomic<uint64_t> streams_made{0}, marks_made{0};

c10::StreamId& of_thread(c10::DeviceIndex device) {
  return streams_of_thread.at(static_cast<size_t>(device));
}

// The session's log, if that is what a stream of `device` is of.
LogWriter* log_of(c10::DeviceIndex device) {
  return streams_in_use() && device == bound_device() ? log_if_open() : nullptr;
}

uint64_t append_mark(c10::DeviceIndex device, uint64_t stream, uint64_t communicator) {
  LogWriter* const log = log_of(device);
  if (!log) return 0;
  const uint64_t mark = marks_made.fetch_add(1) + 1;
  append(*log, Kind::kStreamMark, mark, 2, [&](uint64_t* body) { body[0] = stream, body[1] = communicator; });
  return mark;
}

}  // namespace

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), of_thread(device));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  of_thread(stream.device_index()) = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device, bool high_priority) {
  const auto number = static_cast<c10::StreamId>(streams_made.fetch_add(1) + 1);
  use_streams();
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device),
                     2 * number + (high_priority ? 1 : 0));
}

bool streams_in_use() noexcept { return streams_made.load() != 0; }

uint64_t mark_stream(c10::Stream stream) {
  return append_mark(stream.device_index(), static_cast<uint64_t>(stream.id()), 0);
}

uint64_t mark_work(c10::DeviceIndex device, uint64_t communicator) {
  return append_mark(device, 0, communicator);
}

RecordedAt::RecordedAt(uint64_t mark) { mark_of_events = mark; }
RecordedAt::~RecordedAt() { mark_of_events = 0; }
uint64_t recorded_at() { return mark_of_events; }

void wait_in_stream(c10::Stream stream, uint64_t mark) {
  if (LogWriter* const log = log_of(stream.device_index()))
    append_word(*log, Kind::kStreamWait, mark, static_cast<uint64_t>(stream.id()));
}

void use_in_stream(uint64_t handle, c10::Stream stream) {
  if (LogWriter* const log = log_of(stream.device_index()))
    append_word(*log, Kind::kStreamUse, handle, static_cast<uint64_t>(stream.id()));
}

void use_in_stream(const c10::DataPtr& data, c10::Stream stream) {
  const Buffer* const buffer = buffer_of(data);
  if (buffer && buffer->handle != 0) use_in_stream(buffer->handle, stream);
}

uint64_t stream_of_this_thread() { return static_cast<uint64_t>(of_thread(bound_device())); }

}  // namespace understudy::client
