// What this library knows of CUDA's runtime and of NCCL: the ABI of the calls that it stands in front of, so
// that it is built where neither is installed.
//
// From NVIDIA's cuda_runtime_api.h and driver_types.h (the same in CUDA 11 to 13) and NCCL's nccl.h (2.31).
// tests/csrc/cuda_watch/cuda_abi_check.cpp compares with CUDA's headers, where they are there; NCCL's are in
// no package that this project needs, and are not compared.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct CUevent_st;
struct cudaArray;
struct cudaMemcpy3DParms;
struct cudaMemcpy3DPeerParms;
struct ncclComm;

namespace understudy::cuda {

using Stream = CUstream_st*;
using Event = CUevent_st*;
using Array = cudaArray*;
using ConstArray = const cudaArray*;
using Communicator = ncclComm*;
// Enumerations in C, which travel as int.
using Error = int;
using CopyKind = int;
using CaptureMode = int;
using CaptureStatus = int;
using NcclResult = int;
using DataType = int;
using Reduction = int;

constexpr Error kSuccess = 0;
constexpr Error kUnloading = 4;    // cudaErrorCudartUnloading: the process ends
constexpr Error kNoLibrary = 303;  // cudaErrorSharedObjectInitFailed
constexpr Error kNotReady = 600;   // cudaErrorNotReady
constexpr CaptureStatus kNotCapturing = 0;
constexpr CaptureMode kRelaxed = 2;     // cudaStreamCaptureModeRelaxed
constexpr unsigned kNonBlocking = 1;    // cudaStreamNonBlocking: does not wait for the default stream
constexpr unsigned kDisableTiming = 2;  // cudaEventDisableTiming
constexpr NcclResult kNcclSuccess = 0;
constexpr NcclResult kNcclInternalError = 3;
constexpr NcclResult kNcclInProgress = 7;  // of a communicator that does not block

// The default streams have names besides 0, which stands for the one or the other by how the caller was
// compiled.
inline Stream legacy_stream() { return reinterpret_cast<Stream>(std::uintptr_t{1}); }
inline Stream per_thread_stream() { return reinterpret_cast<Stream>(std::uintptr_t{2}); }

}  // namespace understudy::cuda
