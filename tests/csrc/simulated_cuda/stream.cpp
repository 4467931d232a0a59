#include "tests/csrc/simulated_cuda/stream.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/csrc/simulated_cuda/failures.h"
#include "tests/csrc/simulated_cuda/runtime.h"
#include "tests/csrc/simulated_cuda/settings.h"

namespace understudy::simulated {
namespace {

constexpr int kAssert = 710, kLaunchFailure = 719;

using Streams = std::array<Stream, kStreams>;

std::vector<Streams>& all_streams() {
  static auto* const streams = new std::vector<Streams>(static_cast<size_t>(settings().devices));
  return *streams;
}

// An index that is out of range is an assertion of a CUDA kernel.
int code_of(const std::string& message) {
  return message.find("out of") != std::string::npos ? kAssert : kLaunchFailure;
}

// A kernel that runs, if it is one, from its delay on.
class Running {
 public:
  explicit Running(bool is_kernel) : is_kernel_(is_kernel) {
    if (is_kernel_ && others++ != 0) counters().overlapping++;
  }
  ~Running() {
    if (is_kernel_) others--;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  static inline std::atomic<int> others{0};
  const bool is_kernel_;
};

void run_item(const Stream::Item& item, bool is_kernel) {
  const Running running(is_kernel);
  if (settings().item_delay_us != 0) usleep(static_cast<useconds_t>(settings().item_delay_us));
  if (error_sticks()) return;  // a context that has an error runs nothing any more
  try {
    if (const int code = error_in_stream()) return stick(code, "on demand, in a stream");
    item();
  } catch (const std::exception& problem) {
    stick(code_of(problem.what()), problem.what());
  }
}

}  // namespace

uint64_t Stream::enqueue(Queued queued) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
  items_.push_back(std::move(queued));
  changed_.notify_all();
  return ++enqueued_;
}

void Stream::run() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(1);  // as the processes of tests have it: bits depend on it
  for (;;) {
    Queued next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !items_.empty(); });
      next = std::move(items_.front());
      items_.pop_front();
    }
    run_item(next.item, next.is_kernel);
    next.item = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    done_++;
    changed_.notify_all();
  }
}

void Stream::wait(uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

bool Stream::passed(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= number;
}

uint64_t Stream::newest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

Stream& stream(int device, int64_t id) {
  return all_streams().at(static_cast<size_t>(device)).at(static_cast<size_t>(id));
}

void synchronize_device(int device) {
  for (Stream& one : all_streams().at(static_cast<size_t>(device))) one.wait(one.newest());
}

}  // namespace understudy::simulated
