#include "proxy_server/csrc/nccl/communicator.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "proxy_server/csrc/collectives/waiters.h"

namespace understudy::server::nccl {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kEndPatience{20};  // with what is queued on one that is given up

// Asks again and again: soon at first, as most calls are ready at once.
class Pauses {
 public:
  void pause() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(next_ * 2, kLongest);
  }

 private:
  static constexpr std::chrono::microseconds kLongest{1000};
  std::chrono::microseconds next_{20};
};

// PyTorch has 32 of high priority, which it gives out in turns: after some recoveries, or beside many of a
// script's, it is somebody else's as well.
c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

template <class Guard>
DeviceStream native(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); })
    return guard.getStreamNativeHandle(stream);
  else
    throw LibraryError("this PyTorch does not tell a stream's handle; leave out --collectives own");
}

}  // namespace

Communicator::Communicator(c10::Device device, std::chrono::milliseconds limit)
    : nccl_(library()), device_(device), limit_(limit), stream_(new_stream(device)) {}

std::shared_ptr<Communicator> Communicator::begin(const UniqueId& id, int rank, int size, c10::Device device,
                                                  std::chrono::milliseconds limit) {
  const c10::DeviceGuard guard(device);
  auto made = std::make_shared<Communicator>(device, limit);
  Config config;
  config.blocking = 0;
  check(made->nccl_, made->nccl_.init_rank_config(&made->handle_, size, id, rank, &config));
  return made;
}

std::runtime_error Communicator::error(Result result) {
  std::string text = std::string("NCCL: ") + nccl_.get_error_string(result);
  const char* const more = nccl_.get_last_error(handle_);
  if (more != nullptr && *more != '\0') text += std::string(" (") + more + ")";
  return std::runtime_error(text);
}

void Communicator::check_alive() const {
  if (aborted_ || state_ == State::kRevoked || state_ == State::kGone)
    throw std::runtime_error("NCCL's communicator was aborted");
}

// Whoever aborts may hold the mutex for long.
Communicator::Lock Communicator::lock_unless_aborted() {
  for (Pauses pauses;; pauses.pause()) {
    if (aborted_) throw std::runtime_error("NCCL's communicator was aborted");
    Lock lock(mutex_, std::try_to_lock);
    if (!lock) continue;
    check_alive();
    return lock;
  }
}

void Communicator::wait_until_ready() {
  const auto until = steady_clock::now() + limit_;
  for (Pauses pauses;; pauses.pause()) {
    {
      const Lock lock = lock_unless_aborted();
      Result result = Result::kSuccess;
      check(nccl_, nccl_.get_async_error(handle_, &result));
      if (result == Result::kSuccess) {
        state_ = State::kReady;
        return;
      }
      if (result != Result::kInProgress) throw error(result);
    }
    if (steady_clock::now() > until)
      throw std::runtime_error("NCCL was not ready within " + std::to_string(limit_.count()) + " ms");
  }
}

void Communicator::issue(const Calls& calls) {
  std::exception_ptr problem;
  {
    const Lock lock = lock_unless_aborted();
    if (state_ != State::kReady) throw std::runtime_error("NCCL's communicator is not ready");
    const DeviceStream stream = native(c10::impl::VirtualGuardImpl(device_.type()), stream_);
    check(nccl_, nccl_.group_start());
    state_ = State::kBusy;
    try {
      calls(nccl_, handle_, stream);
    } catch (...) {
      problem = std::current_exception();
    }
    const Result ended = nccl_.group_end();  // in any case: it is open for all that this thread calls
    if (!problem && ended != Result::kSuccess && ended != Result::kInProgress) throw error(ended);
  }
  wait_until_ready();
  if (problem) std::rethrow_exception(problem);
}

void Communicator::given() {
  const Lock lock(last_mutex_);
  if (!last_) last_.emplace(device_.type());
  last_->record(stream_);
}

std::exception_ptr Communicator::problem() {
  const Lock lock(mutex_, std::try_to_lock);
  if (aborted_ || !lock || state_ != State::kReady) return nullptr;
  Result result = Result::kSuccess;
  check(nccl_, nccl_.get_async_error(handle_, &result));
  if (result == Result::kSuccess || result == Result::kInProgress) return nullptr;
  return std::make_exception_ptr(error(result));
}

void Communicator::abort() {
  if (!aborted_.exchange(true)) Waiting::begin([self = shared_from_this()] { self->stop(); });
}

// Revoking ends what runs and keeps the memory, which a peer may still read; it is for one that is ready.
// Where that cannot be, aborting does, and frees it.
void Communicator::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kRevoked || state_ == State::kGone) return;
  const c10::DeviceGuard guard(device_);
  if (state_ == State::kReady && nccl_.revoke != nullptr) {
    const Result result = nccl_.revoke(handle_, 0);
    if (result == Result::kSuccess || result == Result::kInProgress) {
      state_ = State::kRevoked;
      return;
    }
  }
  state_ = State::kGone;
  nccl_.abort(handle_);
}

void Communicator::give_up() {
  Waiting::begin([self = shared_from_this()] { self->end(); });
}

// A device that is lost passes nothing any more.
bool Communicator::has_passed() {
  const Lock lock(last_mutex_);
  try {
    return !last_ || last_->query();
  } catch (const c10::Error&) {
    return true;
  }
}

void Communicator::end() {
  const c10::DeviceGuard guard(device_);
  const auto until = steady_clock::now() + kEndPatience;
  const auto in_time = [&] { return steady_clock::now() < until; };
  bool passed = has_passed();
  for (Pauses pauses; !passed && in_time(); passed = has_passed()) pauses.pause();
  for (Pauses pauses;; pauses.pause()) {
    const Lock lock(mutex_);
    if (state_ == State::kGone) return;
    Result result = Result::kSuccess;
    nccl_.get_async_error(handle_, &result);
    if (result == Result::kInProgress && in_time()) continue;  // it is being revoked
    if (!passed || result == Result::kInProgress) break;
    state_ = State::kGone;
    (result == Result::kSuccess ? nccl_.destroy : nccl_.abort)(handle_);  // nothing runs any more
    return;
  }
  std::fprintf(
      stderr, "understudy: a communicator of NCCL's is left behind, as what was queued on it does not end\n");
}

}  // namespace understudy::server::nccl
