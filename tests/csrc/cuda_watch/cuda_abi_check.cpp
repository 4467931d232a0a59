// Whether abi.h and the tables of the library for LD_PRELOAD say the same as CUDA's own headers; and, as a
// program on CUDA's own runtime, what calls answer: the same with the library in front of it.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <type_traits>

#include "understudy/jit/csrc/cuda_watch/calls/copy_table.h"
#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"

namespace {

using namespace understudy::cuda;

// Enumerations become int, as which they travel.
template <typename Type>
using Plain = std::conditional_t<std::is_enum_v<Type>, int, Type>;

template <typename Function>
struct Signature;
template <typename Result, typename... Parameters>
struct Signature<Result(Parameters...)> {
  using Type = Plain<Result>(Plain<Parameters>...);
};
// A parameter that points to an enumeration: cudaStreamIsCapturing, cudaThreadExchangeStreamCaptureMode.
template <typename Result, typename Enumeration>
  requires std::is_enum_v<Enumeration>
struct Signature<Result(Enumeration*)> {
  using Type = Plain<Result>(int*);
};
template <typename Result, typename First, typename Enumeration>
  requires std::is_enum_v<Enumeration>
struct Signature<Result(First, Enumeration*)> {
  using Type = Plain<Result>(First, int*);
};

template <typename Ours, typename Theirs>
constexpr bool same = std::is_same_v<Ours, Real<typename Signature<Theirs>::Type>>;

static_assert(sizeof(cudaError_t) == sizeof(int) && sizeof(cudaMemcpyKind) == sizeof(int));
static_assert(sizeof(cudaStreamCaptureMode) == sizeof(int) && sizeof(cudaStreamCaptureStatus) == sizeof(int));
static_assert(std::is_same_v<Stream, cudaStream_t> && std::is_same_v<Event, cudaEvent_t>);
static_assert(std::is_same_v<Array, cudaArray_t> && std::is_same_v<ConstArray, cudaArray_const_t>);
static_assert(kSuccess == int{cudaSuccess} && kUnloading == int{cudaErrorCudartUnloading});
static_assert(kNoLibrary == int{cudaErrorSharedObjectInitFailed} && kNotReady == int{cudaErrorNotReady});
static_assert(kNotCapturing == int{cudaStreamCaptureStatusNone} &&
              kRelaxed == int{cudaStreamCaptureModeRelaxed});
static_assert(kNonBlocking == cudaStreamNonBlocking && kDisableTiming == cudaEventDisableTiming);

#define SAME(OURS, THEIRS) static_assert(same<decltype(real::OURS), decltype(THEIRS)>)
SAME(get_last_error, cudaGetLastError);
SAME(peek_at_last_error, cudaPeekAtLastError);
SAME(get_device, cudaGetDevice);
SAME(set_device, cudaSetDevice);
SAME(exchange_capture_mode, cudaThreadExchangeStreamCaptureMode);
SAME(stream_is_capturing, cudaStreamIsCapturing);
SAME(stream_create, cudaStreamCreateWithFlags);
SAME(stream_synchronize, cudaStreamSynchronize);
SAME(stream_query, cudaStreamQuery);
SAME(stream_wait_event, cudaStreamWaitEvent);
SAME(event_create, cudaEventCreateWithFlags);
SAME(event_record, cudaEventRecord);
SAME(event_record_with_flags, cudaEventRecordWithFlags);
SAME(event_query, cudaEventQuery);
SAME(event_destroy, cudaEventDestroy);
SAME(device_synchronize, cudaDeviceSynchronize);

#define COPY_AS(NAME, SYNC, ASYNC, PARAMETERS, ARGUMENTS)                    \
  static_assert(same<Real<Error(UNWRAP PARAMETERS)>, decltype(cuda##NAME)>); \
  static_assert(same<Real<Error(UNWRAP PARAMETERS, Stream)>, decltype(cuda##NAME##Async)>);
#define COPY(NAME, PARAMETERS, ARGUMENTS) COPY_AS(NAME, , Async, PARAMETERS, ARGUMENTS)
UNDERSTUDY_COPIES(COPY, COPY_AS)

}  // namespace

// On a machine without a GPU each is an error, and the same one. Handles are null: nothing is done.
int main() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  char bytes[2] = {'a', 'b'};
  std::printf("record %d\n", cudaEventRecord(nullptr, nullptr));
  std::printf("query %d\n", cudaEventQuery(nullptr));
  std::printf("wait %d\n", cudaStreamWaitEvent(nullptr, nullptr, 0));
  std::printf("destroy %d\n", cudaEventDestroy(nullptr));
  std::printf("last %d\n", cudaGetLastError());
  std::printf("copy %d\n", cudaMemcpy(bytes, bytes + 1, 1, cudaMemcpyHostToHost));
  std::printf("copy %d\n", cudaMemcpyAsync(bytes, bytes + 1, 1, cudaMemcpyHostToHost, nullptr));
  std::printf("capturing %d\n", cudaStreamIsCapturing(nullptr, &status));
  std::printf("stream %d\n", cudaStreamSynchronize(nullptr));
  std::printf("device %d\n", cudaDeviceSynchronize());
  std::printf("last %d\n", cudaGetLastError());
}
