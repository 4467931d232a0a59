// One communication stream: how many collectives were begun on it, and how many are known to have ended.
//
// Behind each collective an event of our own is recorded, a *mark*; the script's own events may be destroyed
// or recorded anew at any moment. When a mark is reached, everything in front of it in the stream has ended.
// The ring of marks is bounded: when it is full, the newest mark moves on.
#pragma once

#include <cstdint>
#include <mutex>

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

namespace understudy::cuda {

struct StreamFacts {
  std::uint64_t stream = 0;  // its handle
  std::int32_t device = -1;
  std::int32_t waiting = 0;       // 1: another stream waits for a collective that has not ended
  std::uint64_t begun = 0;        // collectives
  std::uint64_t ended = 0;        // of these
  std::uint64_t waits = 0;        // cudaStreamWaitEvent by other streams
  std::uint64_t moved_marks = 0;  // because the ring was full
  double oldest = 0;              // seconds since the oldest that has not ended began; 0: all have
};

class WatchedStream {
 public:
  constexpr WatchedStream() = default;

  // Before anybody else can see it.
  void open(Stream stream, int device) {
    stream_ = stream;
    device_ = device;
  }
  Stream stream() const { return stream_; }
  int device() const { return device_; }

  // A collective begins, in the thread that calls it: from here on it has not ended.
  void begin();
  // So many that have begun are in the stream, and a mark is put behind them. False: no event could be
  // recorded, and they count as ended with the one before them.
  bool mark(std::uint64_t calls);
  // NCCL goes on with the calls in a thread of its own. Only the script's next event is surely behind them.
  void mark_later(std::uint64_t calls);
  // The script records an event in this stream. Returns the number of the last collective in front of it.
  std::uint64_t event_recorded();

  // Another stream waits for all up to `last`.
  void waited_for(std::uint64_t last);
  // All up to `last` have ended, as the script's own cudaEventQuery says.
  void has_ended(std::uint64_t last);
  // Asks CUDA about marks, oldest first, until one is not reached. Returns the last error, kNotReady
  // included.
  Error look();
  // Whether a mark is not known to be reached.
  bool pending();
  StreamFacts facts();

 private:
  static constexpr std::uint32_t kMarks = 64;

  struct Mark {
    Event event = nullptr;
    std::uint64_t last = 0;  // number of the last collective that it stands for
    std::int64_t since = 0;  // nanoseconds of a monotonic clock, when the first that it stands for began
  };

  bool mark_locked(std::uint64_t calls);
  Mark& at(std::uint32_t position) { return marks_[position % kMarks]; }
  void drop_ended();  // with the mutex

  Stream stream_ = nullptr;
  int device_ = 0;
  std::mutex mutex_;  // for everything below; not held while CUDA is asked about a mark
  Mark marks_[kMarks];
  std::uint32_t first_ = 0, behind_ = 0;               // marks that are not known to be reached
  std::uint64_t marked_ = 0, ended_ = 0, waited_ = 0;  // collectives have numbers in the order of their marks
  std::uint64_t unmarked_ = 0,
                late_ = 0;  // calls that have begun; of these, what the script's event is behind
  std::int64_t unmarked_since_ = 0;
  std::uint64_t waits_ = 0, moved_ = 0;
};

}  // namespace understudy::cuda
