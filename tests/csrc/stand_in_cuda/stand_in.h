// A STAND-IN for CUDA's runtime and NCCL, without any device: what tests steer it with. It is no emulation:
// only the calls that understudy's library stands in front of, or makes, are there, with what CUDA's
// documentation says of their order, and nothing of their speed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

using namespace understudy::cuda;

extern "C" {
// cuda_runtime_api.h, as far as it is here.
Error cudaGetLastError();
Error cudaPeekAtLastError();
Error cudaGetDevice(int* device);
Error cudaSetDevice(int device);
Error cudaThreadExchangeStreamCaptureMode(CaptureMode* mode);
Error cudaStreamIsCapturing(Stream stream, CaptureStatus* status);
Error cudaStreamCreateWithFlags(Stream* stream, unsigned flags);
Error cudaStreamSynchronize(Stream stream);
Error cudaStreamQuery(Stream stream);
Error cudaStreamWaitEvent(Stream stream, Event event, unsigned flags);
Error cudaDeviceSynchronize();
Error cudaEventCreateWithFlags(Event* event, unsigned flags);
Error cudaEventRecord(Event event, Stream stream);
Error cudaEventRecord_ptsz(Event event, Stream stream);
Error cudaEventQuery(Event event);
Error cudaEventDestroy(Event event);
Error cudaMemcpy(void* to, const void* from, std::size_t bytes, CopyKind kind);
Error cudaMemcpy_ptds(void* to, const void* from, std::size_t bytes, CopyKind kind);
Error cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, CopyKind kind, Stream stream);
Error cudaMemsetAsync(void* to, int value, std::size_t bytes, Stream stream);

// nccl.h, as far as it is here. Communicators are not looked at.
NcclResult ncclAllReduce(const void*, void*, std::size_t, DataType, Reduction, Communicator, Stream);
NcclResult ncclSend(const void*, std::size_t, DataType, int peer, Communicator, Stream);
NcclResult ncclRecv(void*, std::size_t, DataType, int peer, Communicator, Stream);
NcclResult ncclGroupStart();
NcclResult ncclGroupEnd();

// The tests' own.
struct StandInCounters {
  std::uint64_t device_synchronizations;
  std::uint64_t events_created;
  std::uint64_t uses_of_destroyed_events;
  std::uint64_t records_while_capturing;
  std::uint64_t captures_broken;  // a call that CUDA forbids while another thread captures
  std::uint64_t contexts;         // a bit for each device that was used
};
StandInCounters stand_in_counters();
// From here on what `stand_in_gated` puts into a stream waits while its gate is closed.
void stand_in_gate(Stream stream, bool closed);
void stand_in_gated(Stream stream);
void stand_in_capture(Stream stream, bool capturing);
void stand_in_raise(Error error);           // the last error of this thread
void stand_in_blind_others(bool blind);     // cudaEventQuery of all other threads says: not ready
void stand_in_refuse_records(bool refuse);  // of events, as if their device were another
// Of NCCL: what calls return; whether the next one hangs in the host, until it no longer is to; put what a
// call in progress has kept into its stream.
void stand_in_nccl_returns(NcclResult result);
void stand_in_nccl_hangs(bool hangs);
void stand_in_nccl_progresses();
}
