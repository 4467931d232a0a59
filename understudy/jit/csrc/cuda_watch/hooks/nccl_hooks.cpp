// NCCL's calls that put work into a stream. Each counts as begun from its call on, so that one that hangs in
// the host (a peer that does not connect) is seen as well, and gets a mark behind what it has put there.
//
// Between ncclGroupStart and ncclGroupEnd nothing is in the stream yet: marks come behind the end.
#include "understudy/jit/csrc/cuda_watch/hooks/hooks.h"
#include "understudy/jit/csrc/cuda_watch/calls/nccl_table.h"
#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"
#include "understudy/jit/csrc/cuda_watch/watch.h"

namespace understudy::cuda {
namespace {

Real<NcclResult()> constinit group_start{"ncclGroupStart", kNcclInternalError};
Real<NcclResult()> constinit group_end{"ncclGroupEnd", kNcclInternalError};

struct Begun {
  WatchedStream* stream = nullptr;
  std::uint64_t calls = 0;
};

// Of one thread, as NCCL's own groups are.
struct Group {
  int depth = 0;
  bool inside = false;  // of a real call: what that calls in turn is its own affair
  int streams = 0;
  Begun begun[Watch::kStreams];
};
constinit thread_local Group group;

void add_to_group(WatchedStream* stream) {
  for (int index = 0; index < group.streams; index++)
    if (group.begun[index].stream == stream) {
      group.begun[index].calls++;
      return;
    }
  group.begun[group.streams++] = {stream, 1};  // there is room for all that are watched
}

void behind(Begun begun, NcclResult result) {
  if (result == kNcclInProgress)
    begun.stream->mark_later(begun.calls);
  else if (!begun.stream->mark(begun.calls))  // behind a call that failed, too: it has put nothing there
    watch.unmarked.fetch_add(begun.calls, std::memory_order_relaxed);
  watch.marked();
}

template <typename Real, typename... Arguments>
NcclResult collective(Real& real, Stream given, Arguments... arguments) {
  if (group.inside || watch.off()) return real(arguments..., given);
  const Stream stream = given != nullptr ? given : legacy_stream();
  watch.nccl_calls.fetch_add(1, std::memory_order_relaxed);
  const bool captured = is_capturing(stream);
  WatchedStream* const watched = captured ? nullptr : watch.open(stream);
  if (captured)
    watch.captured.fetch_add(1, std::memory_order_relaxed);
  else if (watched == nullptr)
    watch.streams_left_out.fetch_add(1, std::memory_order_relaxed);
  else
    watched->begin();
  group.inside = true;
  const NcclResult result = real(arguments..., given);
  group.inside = false;
  if (watched == nullptr) return result;
  if (group.depth > 0)
    add_to_group(watched);
  else
    behind({watched, 1}, result);
  return result;
}

}  // namespace
}  // namespace understudy::cuda

using namespace understudy::cuda;

UNDERSTUDY_HOOK NcclResult ncclGroupStart() {
  const NcclResult result = group_start();
  if (result == kNcclSuccess && !group.inside) group.depth++;
  return result;
}

UNDERSTUDY_HOOK NcclResult ncclGroupEnd() {
  if (group.inside || watch.off()) return group_end();
  group.inside = true;
  const NcclResult result = group_end();
  group.inside = false;
  if (group.depth > 0 && --group.depth == 0) {
    for (int index = 0; index < group.streams; index++) behind(group.begun[index], result);
    group.streams = 0;
  }
  return result;
}

#define COLLECTIVE(NAME, PARAMETERS, ARGUMENTS)                                                 \
  namespace understudy::cuda::real {                                                            \
  static constinit Real<NcclResult(UNWRAP PARAMETERS, Stream)> NAME{#NAME, kNcclInternalError}; \
  }                                                                                             \
  UNDERSTUDY_HOOK NcclResult NAME(UNWRAP PARAMETERS, Stream stream) {                           \
    return collective(real::NAME, stream, UNWRAP ARGUMENTS);                                    \
  }

UNDERSTUDY_COLLECTIVES(COLLECTIVE)
