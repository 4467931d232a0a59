// All communication streams of this process, and the thread that asks CUDA about their marks.
//
//   NCCL call (script) ──▶ WatchedStream: begin, mark        Poller ── cudaEventQuery of marks ──▶ CUDA
//   cudaEventRecord, cudaStreamWaitEvent, cudaEventQuery ──▶ EventTable: who waits for what
//   Python's watchdog ──▶ facts: reads counters alone, and never waits for CUDA
//
// A stream is a communication stream from the first NCCL call on that is given it (paper 001 §3.1). Nothing
// is freed before the process ends. In a forked child all of it is off: CUDA does not work there either.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "understudy/jit/csrc/cuda_watch/event_table.h"
#include "understudy/jit/csrc/cuda_watch/watched_stream.h"

namespace understudy::cuda {

struct Totals {
  std::uint64_t nccl_calls = 0;
  std::uint64_t captured = 0;          // NCCL calls into a graph that is being captured: not watched
  std::uint64_t unmarked = 0;          // no event could be recorded behind these
  std::uint64_t streams_left_out = 0;  // calls on more streams than can be watched
  std::uint64_t copies_of_saves = 0;   // that went to a stream of their own
  std::int32_t query_error = 0;        // the last error of a mark's cudaEventQuery, 0: none
  std::int32_t streams = 0;
};

class Watch {
 public:
  constexpr Watch() = default;

  static constexpr int kStreams = 64;

  bool off() const { return off_.load(std::memory_order_relaxed); }
  bool idle() const { return count_.load(std::memory_order_acquire) == 0 || off(); }

  // The watched stream of this handle, which becomes one if it is none yet; null: there are too many.
  WatchedStream* open(Stream stream);
  int index_of(Stream stream) const;  // -1: it is none
  WatchedStream& at(int index) { return streams_[index]; }
  int count() const { return count_.load(std::memory_order_acquire); }

  void marked();  // there is something to ask CUDA about
  bool pending();
  // Behind the script's own calls, when they have succeeded.
  void event_recorded(Event event, Stream stream);
  void event_waited_for(Event event, Stream by);
  EventTable& events() { return events_; }
  Totals totals() const;

  std::atomic<std::uint64_t> nccl_calls{0}, captured{0}, unmarked{0}, streams_left_out{0}, copies_of_saves{0};

 private:
  void start_poller();
  void wake();
  void poll();
  Error look_at_all(int& device);
  void end_poller();

  WatchedStream streams_[kStreams];
  std::atomic<int> count_{0};  // streams_ below it never change their handles
  std::mutex opening_;
  EventTable events_;
  std::atomic<bool> off_{false}, ending_{false}, ended_{false};
  std::once_flag started_;
  std::atomic<bool> work_{false};  // whether the poller knows that there is something to look at
  sem_t wake_{};
  std::atomic<Error> query_error_{kSuccess};
};

extern constinit Watch watch;

}  // namespace understudy::cuda
