// A STAND-IN for libcudart, see stand_in.h: a stream is a thread that does what is put into it in order.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/csrc/stand_in_cuda/stand_in.h"

namespace {

constexpr Error kInvalidHandle = 400, kCaptureUnsupported = 900;
constexpr int kDevices = 4;

std::mutex mutex;                              // of everything here
auto& changed = *new std::condition_variable;  // never destroyed: streams wait for it as the process ends
StandInCounters counters{};
std::thread::id sees_all{};  // if set, who alone sees events that are reached
int capturing_streams = 0;
bool refuses_records = false;
// In a forked child, as with CUDA, nothing is done any more: the threads are not there. One of them may have
// had the mutex.
bool forked = false;
[[maybe_unused]] const int forks = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                                  [] {
                                                    forked = true;
                                                    mutex.unlock();
                                                  });

thread_local Error last_error = kSuccess;
thread_local int current_device = 0;
thread_local CaptureMode capture_mode = 0;  // global

Error failed(Error error) {
  last_error = error;
  return error;
}

void use_device() { counters.contexts |= 1u << current_device; }

struct Reached {
  bool yes = false;
};

}  // namespace

struct CUevent_st {
  std::shared_ptr<Reached> record;  // null: never recorded, which counts as reached
};

struct CUstream_st {
  bool blocking = true, capturing = false, closed = false;
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> work;
  std::uint64_t put = 0, done = 0;

  CUstream_st() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return !work.empty(); });
      const auto next = std::move(work.front());
      work.pop_front();
      next(lock);
      done++;
      changed.notify_all();
    }
  }
};

namespace {

std::set<Event>& live_events() {
  static auto& events = *new std::set<Event>;
  return events;
}
std::vector<Event>& dead_events() {  // the newest comes again first
  static auto& events = *new std::vector<Event>;
  return events;
}
std::vector<Stream>& all_streams() {
  static auto& streams = *new std::vector<Stream>;
  return streams;
}

Stream make_stream(bool blocking) {
  const Stream stream = new CUstream_st;
  stream->blocking = blocking;
  all_streams().push_back(stream);
  return stream;
}

Stream legacy() {
  static const Stream stream = make_stream(true);
  return stream;
}

Stream real(Stream stream) {
  static const Stream per_thread = make_stream(true);
  if (stream == nullptr || stream == legacy_stream()) return legacy();
  return stream == per_thread_stream() ? per_thread : stream;
}

Stream per_thread(Stream stream) { return stream != nullptr ? stream : per_thread_stream(); }

template <typename Work>
void put(Stream given, Work work) {
  if (forked) return;
  const Stream stream = real(given);
  std::vector<std::pair<Stream, std::uint64_t>> first;  // the order that the default stream makes
  for (const Stream other : all_streams())
    if (other != stream && other->blocking && stream->blocking && (stream == legacy() || other == legacy()))
      first.emplace_back(other, other->put);
  stream->put++;
  stream->work.push_back([first, work](std::unique_lock<std::mutex>& lock) {
    for (const auto& [other, count] : first) changed.wait(lock, [&] { return other->done >= count; });
    work(lock);
  });
  changed.notify_all();
}

void wait_for(Stream given, std::unique_lock<std::mutex>& lock) {
  if (forked) return;
  const Stream stream = real(given);
  const auto until = stream->put;
  changed.wait(lock, [&] { return stream->done >= until; });
}

bool is_live(Event event) {
  if (live_events().contains(event)) return true;
  counters.uses_of_destroyed_events++;
  return false;
}

}  // namespace

extern "C" {

Error cudaGetLastError() { return std::exchange(last_error, kSuccess); }
Error cudaPeekAtLastError() { return last_error; }
Error cudaGetDevice(int* device) {
  *device = current_device;
  return kSuccess;
}
Error cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return failed(101);
  current_device = device;
  const std::lock_guard lock(mutex);
  use_device();
  return kSuccess;
}
Error cudaThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}
Error cudaStreamIsCapturing(Stream stream, CaptureStatus* status) {
  const std::lock_guard lock(mutex);
  *status = real(stream)->capturing ? 1 : 0;
  return kSuccess;
}
Error cudaStreamCreateWithFlags(Stream* stream, unsigned flags) {
  const std::lock_guard lock(mutex);
  use_device();
  *stream = make_stream((flags & kNonBlocking) == 0);
  return kSuccess;
}
Error cudaStreamSynchronize(Stream stream) {
  std::unique_lock lock(mutex);
  use_device();
  wait_for(stream, lock);
  return kSuccess;
}
Error cudaStreamQuery(Stream stream) {
  const std::lock_guard lock(mutex);
  use_device();
  return real(stream)->done == real(stream)->put ? kSuccess : failed(kNotReady);
}
Error cudaStreamWaitEvent(Stream stream, Event event, unsigned) {
  const std::lock_guard lock(mutex);
  if (!is_live(event)) return failed(kInvalidHandle);
  put(stream, [record = event->record](std::unique_lock<std::mutex>& lock) {
    changed.wait(lock, [&] { return record == nullptr || record->yes; });
  });
  return kSuccess;
}
Error cudaDeviceSynchronize() {
  std::unique_lock lock(mutex);
  use_device();
  counters.device_synchronizations++;
  const auto streams = all_streams();
  for (const Stream stream : streams) wait_for(stream, lock);
  return kSuccess;
}

Error cudaEventCreateWithFlags(Event* event, unsigned) {
  const std::lock_guard lock(mutex);
  use_device();
  counters.events_created++;
  if (dead_events().empty()) {
    *event = new CUevent_st;
  } else {
    *event = dead_events().back();
    dead_events().pop_back();
    (*event)->record = nullptr;
  }
  live_events().insert(*event);
  return kSuccess;
}
Error cudaEventRecord(Event event, Stream stream) {
  const std::lock_guard lock(mutex);
  use_device();
  if (!is_live(event) || refuses_records) return failed(kInvalidHandle);
  if (real(stream)->capturing) {
    counters.records_while_capturing++;
    return kSuccess;
  }
  event->record = std::make_shared<Reached>();
  put(stream, [record = event->record](std::unique_lock<std::mutex>&) { record->yes = true; });
  return kSuccess;
}
Error cudaEventRecord_ptsz(Event event, Stream stream) { return cudaEventRecord(event, per_thread(stream)); }
Error cudaEventQuery(Event event) {
  const std::lock_guard lock(mutex);
  use_device();
  if (capturing_streams > 0 && capture_mode != kRelaxed) {
    counters.captures_broken++;
    return failed(kCaptureUnsupported);
  }
  if (!is_live(event)) return failed(kInvalidHandle);
  if (sees_all != std::thread::id{} && sees_all != std::this_thread::get_id()) return failed(kNotReady);
  return event->record == nullptr || event->record->yes ? kSuccess : failed(kNotReady);
}
Error cudaEventDestroy(Event event) {
  const std::lock_guard lock(mutex);
  if (!is_live(event)) return failed(kInvalidHandle);
  live_events().erase(event);
  dead_events().push_back(event);
  return kSuccess;
}

Error cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, CopyKind, Stream stream) {
  const std::lock_guard lock(mutex);
  use_device();
  put(stream, [=](std::unique_lock<std::mutex>&) { std::memcpy(to, from, bytes); });
  return kSuccess;
}
Error cudaMemcpyAsync_ptsz(void* to, const void* from, std::size_t bytes, CopyKind kind, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, kind, per_thread(stream));
}
Error cudaMemcpy(void* to, const void* from, std::size_t bytes, CopyKind) {
  std::unique_lock lock(mutex);
  use_device();
  put(nullptr, [=](std::unique_lock<std::mutex>&) { std::memcpy(to, from, bytes); });
  wait_for(nullptr, lock);
  return kSuccess;
}
Error cudaMemcpy_ptds(void* to, const void* from, std::size_t bytes, CopyKind) {
  std::unique_lock lock(mutex);
  put(per_thread_stream(), [=](std::unique_lock<std::mutex>&) { std::memcpy(to, from, bytes); });
  wait_for(per_thread_stream(), lock);
  return kSuccess;
}
Error cudaMemsetAsync(void* to, int value, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex);
  put(stream, [=](std::unique_lock<std::mutex>&) { std::memset(to, value, bytes); });
  return kSuccess;
}

StandInCounters stand_in_counters() {
  const std::lock_guard lock(mutex);
  return counters;
}
void stand_in_gate(Stream stream, bool closed) {
  const std::lock_guard lock(mutex);
  real(stream)->closed = closed;
  changed.notify_all();
}
void stand_in_gated(Stream given) {
  const std::lock_guard lock(mutex);
  const Stream stream = real(given);
  if (stream->capturing) return;
  put(stream,
      [stream](std::unique_lock<std::mutex>& lock) { changed.wait(lock, [&] { return !stream->closed; }); });
}
void stand_in_capture(Stream stream, bool capturing) {
  const std::lock_guard lock(mutex);
  real(stream)->capturing = capturing;
  capturing_streams += capturing ? 1 : -1;
}
void stand_in_refuse_records(bool refuse) {
  const std::lock_guard lock(mutex);
  refuses_records = refuse;
}
void stand_in_raise(Error error) { last_error = error; }
void stand_in_blind_others(bool blind) {
  const std::lock_guard lock(mutex);
  sees_all = blind ? std::this_thread::get_id() : std::thread::id{};
}
}
