#include "understudy/jit/csrc/cuda_watch/watch.h"

#include <pthread.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"

namespace understudy::cuda {

constinit Watch watch;

namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(5);
constexpr auto kToEnd = std::chrono::milliseconds(200);  // a query of a driver that hangs may never return

}  // namespace

WatchedStream* Watch::open(Stream stream) {
  if (const int known = index_of(stream); known >= 0) return &streams_[known];
  const std::lock_guard lock(opening_);
  if (const int known = index_of(stream); known >= 0) return &streams_[known];
  const int index = count_.load();
  if (index == kStreams) return nullptr;
  int device = -1;
  if (real::get_device(&device) != kSuccess) {
    real::get_last_error();
    device = -1;
  }
  streams_[index].open(stream, device);
  count_.store(index + 1, std::memory_order_release);
  return &streams_[index];
}

int Watch::index_of(Stream stream) const {
  const int count = count_.load(std::memory_order_acquire);
  for (int index = 0; index < count; index++)
    if (streams_[index].stream() == stream) return index;
  return -1;
}

bool Watch::pending() {
  for (int index = 0; index < count(); index++)
    if (streams_[index].pending()) return true;
  return false;
}

void Watch::event_recorded(Event event, Stream stream) {
  const int index = index_of(stream);
  if (index < 0 || is_capturing(stream)) {
    events_.forget(event);
    return;
  }
  const std::uint64_t last = streams_[index].event_recorded();
  marked();
  events_.note(event, {index, last});
}

void Watch::event_waited_for(Event event, Stream by) {
  const auto place = events_.place_of(event);
  if (place && streams_[place->stream].stream() != by) streams_[place->stream].waited_for(place->last);
}

Totals Watch::totals() const {
  Totals totals;
  totals.nccl_calls = nccl_calls.load();
  totals.captured = captured.load();
  totals.unmarked = unmarked.load();
  totals.streams_left_out = streams_left_out.load();
  totals.copies_of_saves = copies_of_saves.load();
  totals.query_error = query_error_.load();
  totals.streams = count_.load();
  return totals;
}

void Watch::marked() {
  std::call_once(started_, [this] { start_poller(); });
  wake();
}

void Watch::wake() {
  if (!work_.exchange(true)) sem_post(&wake_);
}

// Signals are the script's: none is handled in this thread.
void Watch::start_poller() {
  pthread_atfork(nullptr, nullptr, [] { watch.off_.store(true); });
  sem_init(&wake_, 0, 0);
  std::atexit([] { watch.end_poller(); });  // before the runtime's own, which was loaded earlier
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { poll(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Watch::poll() {
  int device = streams_[0].device();
  if (device >= 0) real::set_device(device);  // before anything that would make a context on another
  const AmidCaptures allowed;                 // this thread asks while others capture
  while (!ending_.load()) {
    if (!pending()) {
      work_.store(false);
      if (!pending()) {  // else it came in between
        while (sem_wait(&wake_) != 0) continue;
        continue;
      }
      work_.store(true);
    }
    if (look_at_all(device) == kUnloading) break;
    std::this_thread::sleep_for(kBetweenLooks);
  }
  ended_.store(true);
}

// The device is set to that of the stream and stays set: a query with another one would make a context there.
Error Watch::look_at_all(int& device) {
  for (int index = 0; index < count(); index++) {
    WatchedStream& stream = streams_[index];
    if (!stream.pending()) continue;
    if (stream.device() >= 0 && stream.device() != device && real::set_device(stream.device()) == kSuccess)
      device = stream.device();
    const Error answer = stream.look();
    if (answer == kUnloading) return answer;
    if (answer != kSuccess && answer != kNotReady) query_error_.store(answer);
    if (answer != kSuccess) real::get_last_error();
  }
  return kSuccess;
}

void Watch::end_poller() {
  if (off()) return;  // a forked child has no such thread
  ending_.store(true);
  wake();
  const auto until = std::chrono::steady_clock::now() + kToEnd;
  while (!ended_.load() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace understudy::cuda
