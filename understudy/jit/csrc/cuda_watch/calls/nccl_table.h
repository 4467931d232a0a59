// NCCL's calls that put work into a stream, their last parameter: COLLECTIVE(name, parameters, arguments).
//
// Not here: the one-sided ones (ncclPutSignal), and the variants with a configuration for each call (2.31).
#pragma once

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

#define UNWRAP(...) __VA_ARGS__

#define UNDERSTUDY_COLLECTIVES(COLLECTIVE)                                                                 \
  COLLECTIVE(ncclAllReduce,                                                                                \
             (const void* from, void* to, std::size_t count, DataType type, Reduction operation,           \
              Communicator ranks),                                                                         \
             (from, to, count, type, operation, ranks))                                                    \
  COLLECTIVE(ncclReduceScatter,                                                                            \
             (const void* from, void* to, std::size_t count, DataType type, Reduction operation,           \
              Communicator ranks),                                                                         \
             (from, to, count, type, operation, ranks))                                                    \
  COLLECTIVE(ncclReduce,                                                                                   \
             (const void* from, void* to, std::size_t count, DataType type, Reduction operation, int root, \
              Communicator ranks),                                                                         \
             (from, to, count, type, operation, root, ranks))                                              \
  COLLECTIVE(ncclBroadcast,                                                                                \
             (const void* from, void* to, std::size_t count, DataType type, int root, Communicator ranks), \
             (from, to, count, type, root, ranks))                                                         \
  COLLECTIVE(ncclBcast, (void* buffer, std::size_t count, DataType type, int root, Communicator ranks),    \
             (buffer, count, type, root, ranks))                                                           \
  COLLECTIVE(ncclAllGather,                                                                                \
             (const void* from, void* to, std::size_t count, DataType type, Communicator ranks),           \
             (from, to, count, type, ranks))                                                               \
  COLLECTIVE(ncclAlltoAll,                                                                                 \
             (const void* from, void* to, std::size_t count, DataType type, Communicator ranks),           \
             (from, to, count, type, ranks))                                                               \
  COLLECTIVE(ncclGather,                                                                                   \
             (const void* from, void* to, std::size_t count, DataType type, int root, Communicator ranks), \
             (from, to, count, type, root, ranks))                                                         \
  COLLECTIVE(ncclScatter,                                                                                  \
             (const void* from, void* to, std::size_t count, DataType type, int root, Communicator ranks), \
             (from, to, count, type, root, ranks))                                                         \
  COLLECTIVE(ncclSend, (const void* from, std::size_t count, DataType type, int peer, Communicator ranks), \
             (from, count, type, peer, ranks))                                                             \
  COLLECTIVE(ncclRecv, (void* to, std::size_t count, DataType type, int peer, Communicator ranks),         \
             (to, count, type, peer, ranks))
