// CUDA's copies, which in a save go to the stream of the save; elsewhere they are passed on as they came.
#include "understudy/jit/csrc/cuda_watch/calls/copy_table.h"
#include "understudy/jit/csrc/cuda_watch/hooks/hooks.h"
#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"
#include "understudy/jit/csrc/cuda_watch/saving.h"
#include "understudy/jit/csrc/cuda_watch/watch.h"

namespace understudy::cuda {
namespace {

template <typename Async, typename... What>
Error copy_async(Async& real, Stream stream, What... what) {
  const Stream own = saving::stream_here();
  if (own != nullptr) watch.copies_of_saves.fetch_add(1, std::memory_order_relaxed);
  return real(what..., own != nullptr ? own : stream);
}

template <typename Sync, typename Async, typename... What>
Error copy(Sync& real, Async& async, What... what) {
  const Stream own = saving::stream_here();
  if (own == nullptr) return real(what...);
  watch.copies_of_saves.fetch_add(1, std::memory_order_relaxed);
  const Error result = async(what..., own);
  return result == kSuccess ? real::stream_synchronize(own) : result;
}

}  // namespace
}  // namespace understudy::cuda

using namespace understudy::cuda;

// One name of a copy that waits, and of the same copy that does not, whose last parameter is the stream.
#define COPY_AS(NAME, SYNC, ASYNC, PARAMETERS, ARGUMENTS)                                               \
  namespace understudy::cuda::real {                                                                    \
  static constinit Real<Error(UNWRAP PARAMETERS)> NAME##SYNC{"cuda" #NAME #SYNC, kNoLibrary};           \
  static constinit Real<Error(UNWRAP PARAMETERS, Stream)> NAME##ASYNC{"cuda" #NAME #ASYNC, kNoLibrary}; \
  }                                                                                                     \
  UNDERSTUDY_HOOK Error cuda##NAME##SYNC(UNWRAP PARAMETERS) {                                           \
    return copy(real::NAME##SYNC, real::NAME##ASYNC, UNWRAP ARGUMENTS);                                 \
  }                                                                                                     \
  UNDERSTUDY_HOOK Error cuda##NAME##ASYNC(UNWRAP PARAMETERS, Stream stream) {                           \
    return copy_async(real::NAME##ASYNC, stream, UNWRAP ARGUMENTS);                                     \
  }
#define COPY(NAME, PARAMETERS, ARGUMENTS)       \
  COPY_AS(NAME, , Async, PARAMETERS, ARGUMENTS) \
  COPY_AS(NAME, _ptds, Async_ptsz, PARAMETERS, ARGUMENTS)

UNDERSTUDY_COPIES(COPY, COPY_AS)
