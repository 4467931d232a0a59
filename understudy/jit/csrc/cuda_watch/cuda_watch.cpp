// Watches NCCL's streams and leads the copies of a save past them (paper 001 §3.1-3.2): the functions that
// understudy/jit/cuda_watch.py calls. The library is for LD_PRELOAD; without NCCL calls it does nothing.
//
//   cuda_hooks, copy_hooks, nccl_hooks   what the script calls       watch    streams, and the thread that
//   asks real_calls                           what is behind those        saving   streams of a save
#include <algorithm>
#include <type_traits>

#include "understudy/jit/csrc/cuda_watch/hooks/hooks.h"
#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"
#include "understudy/jit/csrc/cuda_watch/saving.h"
#include "understudy/jit/csrc/cuda_watch/watch.h"

using namespace understudy::cuda;

// cuda_watch.py has both structures field by field.
static_assert(std::is_standard_layout_v<StreamFacts> && sizeof(StreamFacts) == 56);
static_assert(std::is_standard_layout_v<Totals> && sizeof(Totals) == 48);

UNDERSTUDY_HOOK int understudy_cuda_watch_version() { return 1; }

// Facts of up to `room` streams, and of all together. Returns how many streams were written.
UNDERSTUDY_HOOK int understudy_cuda_watch_facts(StreamFacts* streams, int room, Totals* totals) {
  if (watch.off()) {
    *totals = Totals{};
    return 0;
  }
  *totals = watch.totals();
  const int count = std::min(room, watch.count());
  for (int index = 0; index < count; index++) streams[index] = watch.at(index).facts();
  return count;
}

UNDERSTUDY_HOOK void understudy_cuda_watch_begin_save() { saving::begin(); }
UNDERSTUDY_HOOK void understudy_cuda_watch_end_save() { saving::end(); }
UNDERSTUDY_HOOK Stream understudy_cuda_watch_save_stream(int device) { return saving::stream_of(device); }

// Waits until everything that is in `stream` has ended, if a collective has not. Returns CUDA's error. Into a
// graph nothing is done yet, and waiting would break it.
UNDERSTUDY_HOOK Error understudy_cuda_watch_settle(Stream stream) {
  if (watch.off() || !watch.pending() || is_capturing(stream)) return kSuccess;
  return real::stream_synchronize(stream);
}

// Whether all that is in `stream` has ended; kNotReady, or another error of CUDA. In the thread that saves.
UNDERSTUDY_HOOK Error understudy_cuda_watch_is_idle(Stream stream) {
  const AmidCaptures allowed;
  const Error answer = real::stream_query(stream);
  if (answer != kSuccess) real::get_last_error();
  return answer;
}

UNDERSTUDY_HOOK int understudy_cuda_watch_boundary(int device, Stream stream) {
  return saving::boundary(device, stream) ? 1 : 0;
}
UNDERSTUDY_HOOK Error understudy_cuda_watch_boundary_reached(int device) {
  return saving::boundary_reached(device);
}
