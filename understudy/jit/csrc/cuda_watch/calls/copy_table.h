// CUDA's copies that a save leads to its own stream: COPY(NAME, parameters, arguments) stands for cudaNAME,
// cudaNAMEAsync, whose last parameter is the stream, and both compiled for per-thread default streams.
// COPY_AS says what is behind the two names.
//
// Not here, and so issued where they always are: batches (cudaMemcpyBatchAsync, whose parameters differ
// between CUDA 12 and 13), arrays to arrays, cudaMemset3D, and what CUDA calls deprecated. No PyTorch tensor
// is copied so.
#pragma once

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

#define UNWRAP(...) __VA_ARGS__

#define UNDERSTUDY_COPIES(COPY, COPY_AS)                                                                     \
  COPY(Memcpy, (void* to, const void* from, std::size_t bytes, CopyKind kind), (to, from, bytes, kind))      \
  COPY(Memcpy2D,                                                                                             \
       (void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,         \
        std::size_t height, CopyKind kind),                                                                  \
       (to, to_pitch, from, from_pitch, width, height, kind))                                                \
  COPY(Memcpy2DToArray,                                                                                      \
       (Array to, std::size_t x, std::size_t y, const void* from, std::size_t pitch, std::size_t width,      \
        std::size_t height, CopyKind kind),                                                                  \
       (to, x, y, from, pitch, width, height, kind))                                                         \
  COPY(Memcpy2DFromArray,                                                                                    \
       (void* to, std::size_t pitch, ConstArray from, std::size_t x, std::size_t y, std::size_t width,       \
        std::size_t height, CopyKind kind),                                                                  \
       (to, pitch, from, x, y, width, height, kind))                                                         \
  COPY(Memcpy3D, (const cudaMemcpy3DParms* what), (what))                                                    \
  COPY(Memcpy3DPeer, (const cudaMemcpy3DPeerParms* what), (what))                                            \
  COPY(MemcpyToSymbol,                                                                                       \
       (const void* to, const void* from, std::size_t bytes, std::size_t offset, CopyKind kind),             \
       (to, from, bytes, offset, kind))                                                                      \
  COPY(MemcpyFromSymbol, (void* to, const void* from, std::size_t bytes, std::size_t offset, CopyKind kind), \
       (to, from, bytes, offset, kind))                                                                      \
  COPY_AS(MemcpyPeer, , Async,                                                                               \
          (void* to, int to_device, const void* from, int from_device, std::size_t bytes),                   \
          (to, to_device, from, from_device, bytes))                                                         \
  COPY(Memset, (void* to, int value, std::size_t bytes), (to, value, bytes))                                 \
  COPY(Memset2D, (void* to, std::size_t pitch, int value, std::size_t width, std::size_t height),            \
       (to, pitch, value, width, height))
