// The script's streams, as streams of the GPU: the default one, and sixteen that all others share by number.
//
// Records keep their one order, and a replay repeats it; on the device those of two streams overlap, as the
// script's events permit. What we do ourselves - commits, digests, going back - is on the default stream, and
// stands between what any stream was given before and after it (OnDefaultStream).
//
// What a commit left is copied before any stream changes it, beside all of them: a copy on the first one to
// do so would wait for what that one waits for, and read what others write meanwhile to other parts.
//
// On a processor there is one order, and nothing to do here.
#pragma once
#include <ATen/core/TensorBody.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "replay/csrc/log/log_format.h"

namespace understudy::server {

class ScriptStreams {
 public:
  // Called with a stream that has just been opened.
  using Opened = std::function<void(c10::Stream)>;
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  explicit ScriptStreams(c10::Device device);
  void when_opened(Opened act) { opened_ = std::move(act); }

  // Whether there are others than the default one.
  bool several() const { return open_ > 1; }
  // What the calling thread enqueues from here on is enqueued there.
  void enter(uint64_t stream);
  // How far `stream` has come.
  void mark(uint64_t mark, uint64_t stream);
  // The mark is the end of these.
  void mark(uint64_t mark, Works works);
  // What follows on `stream` waits for the mark, on the device; for all that any stream was given, if it was
  // one too many.
  void wait(uint64_t mark, uint64_t stream);
  // The memory of `content` is free again only when `stream` is through with what it was given.
  void use(const c10::Storage& content, uint64_t stream);
  void use(const c10::Storage& content, c10::Stream stream) const;
  // The same of the calling thread's current stream, and of the one for copies, for what is about to go.
  void use_here(const c10::Storage& content) const;
  // As the calling thread's current stream.
  void on(uint64_t stream, const std::function<void()>& act);
  struct Mark {
    std::optional<c10::Event> event;
    Works works;
  };
  const Mark* find(uint64_t mark) const;
  // Whether the device has surely passed a mark that is not found: those before a commit, or before what the
  // session went back to, are forgotten.
  bool is_past(uint64_t mark) const { return !dropped_ && find(mark) == nullptr; }
  void forget_marks();

  c10::Event mark_here() const;  // of the calling thread's current stream

  // Of the streams that are open, with their places.
  void each(const std::function<void(size_t place, c10::Stream)>& act) const;
  size_t current_place() const;  // of the calling thread's
  // On each open stream but the calling thread's current one, as that.
  void on_each_other(const std::function<void()>& act) const;
  // For copies of what the last commit left; the current one where there is one stream.
  c10::Stream for_copies() const;
  // They have been given to it.
  void copied();
  // The current stream goes on behind all of them: before it changes anything of which there may be one.
  void stay_behind_copies();
  // For what a snapshot copies, beside all else.
  c10::Stream for_snapshots();
  // What the default stream is given from here on comes behind what any was given.
  void gather();
  // What any stream is given from here on comes behind what the default one was given.
  void spread();

 private:
  friend class OnDefaultStream;
  static constexpr size_t kMostMarks = 4096;  // older ones have long been waited for, as a rule
  c10::Stream at(uint64_t stream);
  c10::Stream current() const;

  const c10::Device device_;
  std::array<std::optional<c10::Stream>, replay::kStreams> streams_;
  size_t open_ = 0;
  Opened opened_;
  std::optional<c10::Stream> copies_, snapshots_;
  std::optional<c10::Event> copied_;  // the end of the newest copies
  uint64_t times_copied_ = 0;
  std::array<uint64_t, replay::kStreams> behind_{};  // so many of these times
  void keep(uint64_t mark, Mark what);
  std::map<uint64_t, Mark> marks_;
  std::deque<uint64_t> order_;
  std::vector<uint64_t> unended_;  // marks of works that hold memory
  bool dropped_ = false;           // there were more than kMostMarks
  int together_ = 0;               // OnDefaultStream, how deep
};

// While it lives, the calling thread works on the default stream, behind all that any stream has been given;
// what any is given afterwards comes behind that.
class OnDefaultStream {
 public:
  explicit OnDefaultStream(ScriptStreams& streams);
  ~OnDefaultStream();
  OnDefaultStream(const OnDefaultStream&) = delete;
  OnDefaultStream& operator=(const OnDefaultStream&) = delete;

 private:
  ScriptStreams* const streams_;  // none where there is nothing to do
  c10::Stream before_;
};

}  // namespace understudy::server
