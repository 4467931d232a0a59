// Frees the GIL from a thread that hangs in C and has it (paper 001 §3.2): without it no Python thread could
// save anything.
//
//   watchdog (Python)  ── beat(patience) ──▶  Watcher, a thread that never takes the GIL
//                                                 │ no beat within `patience`: a signal, thread by thread
//   whoever has the GIL  ◀────────────────────────┘
//     handler: releases the GIL and stays there for ever; the process is to save, and to end
//
// A thread that comes back from C at the very moment at which patience ends may be caught as well: whoever
// asks must take `freed()` for a hang in either case.
#include <dirent.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kShortestTick{0.05};
constexpr Seconds kLongestTick{0.5};
constexpr double kTicks = 40;  // of which patience has so many, within these bounds: waking costs
constexpr double kCountsMost =
    4;  // ticks that count of one that lasted longer: we may have been stopped, too
constexpr auto kToAnswer =
    std::chrono::milliseconds(20);  // how long a signalled thread may take to its handler

std::atomic<bool> hunting{false};
std::atomic<pid_t> parked{0};

pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// In the thread that got the signal. It runs no Python: it is in C, or it does not have the GIL.
void on_signal(int) {
  const int kept = errno;
  if (hunting.load() && PyGILState_Check()) {
    hunting.store(false);
    parked.store(this_thread());
    PyEval_SaveThread();
    for (;;) pause();
  }
  errno = kept;
}

// The first realtime signal, from the last one down, that nobody uses; 0 if there is none.
int take_signal() {
  for (int number = SIGRTMAX; number >= SIGRTMIN; number--) {
    struct sigaction now{};
    if (sigaction(number, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;
    struct sigaction ours{};
    ours.sa_handler = on_signal;
    ours.sa_flags = SA_RESTART;
    sigfillset(&ours.sa_mask);
    if (sigaction(number, &ours, nullptr) == 0) return number;
  }
  return 0;
}

std::vector<pid_t> threads() {
  std::vector<pid_t> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/proc/self/task"), closedir);
  while (const dirent* entry = directory ? readdir(directory.get()) : nullptr)
    if (const int id = std::atoi(entry->d_name); id > 0) found.push_back(id);
  return found;
}

class Watcher {
 public:
  explicit Watcher(int signal) : signal_(signal), thread_([this] { run(); }) {}

  ~Watcher() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // Called by the watchdog. `patience`: seconds, until the next beat.
  void beat(double patience) {
    patience_.store(patience);
    watchdog_.store(this_thread());
    beats_.fetch_add(1);
  }

 private:
  void run() {
    uint64_t seen = 0;
    Seconds waited{0};
    auto before = Clock::now();
    auto tick = kShortestTick;
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, tick, [this] { return ended_; })) {
      const auto now = Clock::now();
      waited += std::min(kCountsMost * tick, Seconds(now - before));
      before = now;
      tick = std::clamp(Seconds(patience_.load() / kTicks), kShortestTick, kLongestTick);
      const uint64_t beats = beats_.load();
      if (beats != seen || beats == 0) {
        seen = beats;
        waited = Seconds(0);
      } else if (waited.count() > patience_.load() && parked.load() == 0) {
        hunt(seen);
      }
    }
  }

  void hunt(uint64_t seen) {
    const pid_t own = this_thread();
    for (const pid_t thread : threads()) {
      if (thread == own || thread == watchdog_.load()) continue;
      if (beats_.load() != seen) return;
      hunting.store(true);
      if (syscall(SYS_tgkill, getpid(), thread, signal_) == 0) std::this_thread::sleep_for(kToAnswer);
      hunting.store(false);
      if (parked.load() != 0) return;
    }
  }

  const int signal_;
  std::atomic<double> patience_{0};
  std::atomic<uint64_t> beats_{0};
  std::atomic<pid_t> watchdog_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the others
};

Watcher* watcher = nullptr;  // of the process that started it; touched with the GIL alone

void start() {
  if (watcher != nullptr) throw std::runtime_error("the GIL is watched already");
  static const int signal = take_signal();
  if (signal == 0) throw std::runtime_error("every realtime signal of this process has a handler");
  parked.store(0);
  watcher = new Watcher(signal);
}

void stop() {
  Watcher* const ended = std::exchange(watcher, nullptr);
  const pybind11::gil_scoped_release release;
  delete ended;
}

// Behind a fork, in the child: there is no thread to end.
void forget() { watcher = nullptr; }

}  // namespace

PYBIND11_MODULE(_gil, module) {
  module.doc() = "Frees the GIL from a thread that hangs in C and has it (paper 001 §3.2).";
  module.def("start", &start, "Begin to watch; with the first beat it counts. Raises RuntimeError.");
  module.def(
      "beat",
      [](double patience) {
        if (watcher != nullptr) watcher->beat(patience);
      },
      pybind11::arg("patience"), "The caller has the GIL, and will be back within `patience` seconds.");
  module.def(
      "freed", [] { return parked.load(); }, "The thread (gettid) that was made to give it up; 0: none.");
  module.def("stop", &stop, "Watch no more; a thread that was made to give it up stays where it is.");
  module.def("forget", &forget, "In a forked child: it is not watched.");
}
