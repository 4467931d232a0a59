// The functions behind ours: found when they are first called, by when whoever calls has loaded them.
//
// Nothing is linked against. PyTorch's libraries may be in a scope of their own (dlopen without RTLD_GLOBAL),
// which RTLD_NEXT does not see; there the loaded library is asked by its name. With several runtimes in one
// process, all calls go to the first that is found.
#pragma once

#include <atomic>

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

namespace understudy::cuda {

// Null where no loaded library but this one has it.
void* find_call(const char* name);

template <typename Signature>
class Real;

template <typename Result, typename... Arguments>
class Real<Result(Arguments...)> {
 public:
  using Function = Result (*)(Arguments...);

  // `missing`: what a call returns where there is no such function.
  constexpr Real(const char* name, Result missing) : name_(name), missing_(missing) {}

  Result operator()(Arguments... arguments) {
    const Function function = found();
    return function != nullptr ? function(arguments...) : missing_;
  }

 private:
  Function found() {
    Function function = found_.load(std::memory_order_acquire);
    if (function == nullptr) {
      function = reinterpret_cast<Function>(find_call(name_));
      found_.store(function, std::memory_order_release);
    }
    return function;
  }

  const char* const name_;
  const Result missing_;
  std::atomic<Function> found_{nullptr};
};

namespace real {
// What this library calls for itself.
inline constinit Real<Error()> get_last_error{"cudaGetLastError", kNoLibrary};
inline constinit Real<Error()> peek_at_last_error{"cudaPeekAtLastError", kNoLibrary};
inline constinit Real<Error(int*)> get_device{"cudaGetDevice", kNoLibrary};
inline constinit Real<Error(int)> set_device{"cudaSetDevice", kNoLibrary};
inline constinit Real<Error(CaptureMode*)> exchange_capture_mode{"cudaThreadExchangeStreamCaptureMode",
                                                                 kNoLibrary};
inline constinit Real<Error(Stream, CaptureStatus*)> stream_is_capturing{"cudaStreamIsCapturing", kNoLibrary};
inline constinit Real<Error(Stream*, unsigned)> stream_create{"cudaStreamCreateWithFlags", kNoLibrary};
inline constinit Real<Error(Stream)> stream_synchronize{"cudaStreamSynchronize", kNoLibrary};
inline constinit Real<Error(Stream)> stream_query{"cudaStreamQuery", kNoLibrary};
inline constinit Real<Error(Event*, unsigned)> event_create{"cudaEventCreateWithFlags", kNoLibrary};
inline constinit Real<Error(Event, Stream)> event_record{"cudaEventRecord", kNoLibrary};
inline constinit Real<Error(Event)> event_query{"cudaEventQuery", kNoLibrary};
// What only stands behind a hook.
inline constinit Real<Error(Event, Stream, unsigned)> event_record_with_flags{"cudaEventRecordWithFlags",
                                                                              kNoLibrary};
inline constinit Real<Error(Stream, Event, unsigned)> stream_wait_event{"cudaStreamWaitEvent", kNoLibrary};
inline constinit Real<Error(Event)> event_destroy{"cudaEventDestroy", kNoLibrary};
inline constinit Real<Error()> device_synchronize{"cudaDeviceSynchronize", kNoLibrary};
}  // namespace real

// While it lives, calls of this thread are allowed although another thread captures a graph.
class AmidCaptures {
 public:
  AmidCaptures() { real::exchange_capture_mode(&mode_); }
  ~AmidCaptures() { real::exchange_capture_mode(&mode_); }
  AmidCaptures(const AmidCaptures&) = delete;
  AmidCaptures& operator=(const AmidCaptures&) = delete;

 private:
  CaptureMode mode_ = kRelaxed;
};

// Whether the script would see no error that it has not asked about yet. Ours are then cleared behind us.
inline bool no_error_is_pending() { return real::peek_at_last_error() == kSuccess; }

// True where it cannot be told as well: nothing may be recorded then.
inline bool is_capturing(Stream stream) {
  const bool quiet = no_error_is_pending();
  CaptureStatus status = kNotCapturing;
  if (real::stream_is_capturing(stream, &status) == kSuccess) return status != kNotCapturing;
  if (quiet) real::get_last_error();
  return true;
}

}  // namespace understudy::cuda
