#include "understudy/jit/csrc/cuda_watch/saving.h"

#include <atomic>
#include <mutex>

#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"
#include "understudy/jit/csrc/cuda_watch/watch.h"

namespace understudy::cuda::saving {
namespace {

constexpr int kDevices = 64;

constinit thread_local int depth = 0;
constinit std::mutex making;
constinit std::atomic<Stream> streams[kDevices];
constinit std::mutex boundaries;
constinit Event boundary_events[kDevices];  // with its mutex
enum class Put { kNever, kDone, kFailed };
constinit Put boundary_put[kDevices];  // with the mutex

Stream made_on_current(int device) {
  if (const Stream made = streams[device].load(std::memory_order_acquire)) return made;
  const std::lock_guard lock(making);
  if (const Stream made = streams[device].load()) return made;
  Stream made = nullptr;
  const bool quiet = no_error_is_pending();
  const AmidCaptures allowed;
  if (real::stream_create(&made, kNonBlocking) != kSuccess) {
    if (quiet) real::get_last_error();
    return nullptr;
  }
  streams[device].store(made, std::memory_order_release);
  return made;
}

// In a thread that has used the device it had before: else that would get a context by being set again.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (real::get_device(&before_) == kSuccess && before_ != device)
      changed_ = real::set_device(device) == kSuccess;
  }
  ~OnDevice() {
    if (changed_) real::set_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace

void begin() { depth++; }

void end() {
  if (depth > 0) depth--;
}

Stream stream_here() {
  int device = -1;
  if (depth == 0 || watch.off() || real::get_device(&device) != kSuccess) return nullptr;
  return device >= 0 && device < kDevices ? made_on_current(device) : nullptr;
}

Stream stream_of(int device) {
  if (device < 0 || device >= kDevices || watch.off() || real::set_device(device) != kSuccess) return nullptr;
  return made_on_current(device);
}

bool boundary(int device, Stream stream) {
  if (device < 0 || device >= kDevices || watch.off()) return false;
  const std::lock_guard lock(boundaries);
  boundary_put[device] = Put::kFailed;
  if (!no_error_is_pending() || is_capturing(stream)) return false;
  const OnDevice there(device);
  const AmidCaptures allowed;
  Event& event = boundary_events[device];
  if ((event != nullptr || real::event_create(&event, kDisableTiming) == kSuccess) &&
      real::event_record(event, stream) == kSuccess) {
    boundary_put[device] = Put::kDone;
    return true;
  }
  real::get_last_error();
  return false;
}

Error boundary_reached(int device) {
  if (device < 0 || device >= kDevices || watch.off()) return kSuccess;
  const std::lock_guard lock(boundaries);
  if (boundary_put[device] != Put::kDone)
    return boundary_put[device] == Put::kNever ? kSuccess : kCannotBeTold;
  real::set_device(device);
  const AmidCaptures allowed;
  const Error answer = real::event_query(boundary_events[device]);
  if (answer != kSuccess) real::get_last_error();
  return answer;
}

}  // namespace understudy::cuda::saving
