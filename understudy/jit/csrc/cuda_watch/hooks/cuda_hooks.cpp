// CUDA's calls that this library stands in front of. Each calls the real one; what it notes costs no call of
// CUDA's where no NCCL stream is known, and none but at events on such streams.
//
// Programs compiled for per-thread default streams call the same functions with _ptds or _ptsz behind their
// names.
#include "understudy/jit/csrc/cuda_watch/hooks/hooks.h"
#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"
#include "understudy/jit/csrc/cuda_watch/saving.h"
#include "understudy/jit/csrc/cuda_watch/watch.h"

namespace understudy::cuda {
namespace {

// The name under which a stream is watched: 0 is another one for each way of compiling.
Stream named(Stream stream, bool per_thread) {
  if (stream != nullptr) return stream;
  return per_thread ? per_thread_stream() : legacy_stream();
}

constinit Real<Error(Event, Stream)> record_ptsz{"cudaEventRecord_ptsz", kNoLibrary};
constinit Real<Error(Event, Stream, unsigned)> record_with_flags_ptsz{"cudaEventRecordWithFlags_ptsz",
                                                                      kNoLibrary};
constinit Real<Error(Stream, Event, unsigned)> wait_event_ptsz{"cudaStreamWaitEvent_ptsz", kNoLibrary};
constinit Real<Error(Stream)> synchronize_ptsz{"cudaStreamSynchronize_ptsz", kNoLibrary};
constinit Real<Error(Stream)> query_ptsz{"cudaStreamQuery_ptsz", kNoLibrary};

// An event that the saving thread records stands for its copies.
template <typename Record, typename... Flags>
Error record(Record& real, bool per_thread, Event event, Stream stream, Flags... flags) {
  if (const Stream own = saving::stream_here()) {
    watch.events().forget(event);
    return real(event, own, flags...);
  }
  const Error result = real(event, stream, flags...);
  if (result == kSuccess && !watch.idle()) watch.event_recorded(event, named(stream, per_thread));
  return result;
}

template <typename Wait>
Error wait(Wait& real, bool per_thread, Stream stream, Event event, unsigned flags) {
  const Error result = real(stream, event, flags);
  if (result == kSuccess && !watch.idle()) watch.event_waited_for(event, named(stream, per_thread));
  return result;
}

template <typename Call>
Error about(Call& real, Stream stream) {
  const Stream own = saving::stream_here();
  return real(own != nullptr ? own : stream);
}

}  // namespace
}  // namespace understudy::cuda

using namespace understudy::cuda;

UNDERSTUDY_HOOK Error cudaEventRecord(Event event, Stream stream) {
  return record(real::event_record, false, event, stream);
}
UNDERSTUDY_HOOK Error cudaEventRecord_ptsz(Event event, Stream stream) {
  return record(record_ptsz, true, event, stream);
}
UNDERSTUDY_HOOK Error cudaEventRecordWithFlags(Event event, Stream stream, unsigned flags) {
  return record(real::event_record_with_flags, false, event, stream, flags);
}
UNDERSTUDY_HOOK Error cudaEventRecordWithFlags_ptsz(Event event, Stream stream, unsigned flags) {
  return record(record_with_flags_ptsz, true, event, stream, flags);
}

UNDERSTUDY_HOOK Error cudaStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  return wait(real::stream_wait_event, false, stream, event, flags);
}
UNDERSTUDY_HOOK Error cudaStreamWaitEvent_ptsz(Stream stream, Event event, unsigned flags) {
  return wait(wait_event_ptsz, true, stream, event, flags);
}

// What the script sees of a watched event, nobody needs to ask again.
UNDERSTUDY_HOOK Error cudaEventQuery(Event event) {
  if (watch.idle()) return real::event_query(event);
  const auto before = watch.events().place_of(event);
  const Error result = real::event_query(event);
  if (result == kSuccess && before && watch.events().place_of(event) == before)
    watch.at(before->stream).has_ended(before->last);
  return result;
}

UNDERSTUDY_HOOK Error cudaEventDestroy(Event event) {
  if (!watch.idle()) watch.events().forget(event);  // first: its handle may come again at once
  return real::event_destroy(event);
}

UNDERSTUDY_HOOK Error cudaStreamSynchronize(Stream stream) { return about(real::stream_synchronize, stream); }
UNDERSTUDY_HOOK Error cudaStreamSynchronize_ptsz(Stream stream) { return about(synchronize_ptsz, stream); }
UNDERSTUDY_HOOK Error cudaStreamQuery(Stream stream) { return about(real::stream_query, stream); }
UNDERSTUDY_HOOK Error cudaStreamQuery_ptsz(Stream stream) { return about(query_ptsz, stream); }

UNDERSTUDY_HOOK Error cudaDeviceSynchronize() {
  const Stream own = saving::stream_here();
  return own != nullptr ? real::stream_synchronize(own) : real::device_synchronize();
}
