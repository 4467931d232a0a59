// The simulated device as PyTorch sees it: allocator, guard and hooks at CUDA's places of a CPU build.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>

#include "tests/csrc/simulated_cuda/memory.h"
#include "tests/csrc/simulated_cuda/stream.h"

namespace understudy::simulated {

c10::DeviceAllocator* allocator();
Memory& memory(int device);

int current_device();
int64_t current_stream_id(int device);
// Where the calling thread enqueues now.
Stream& current_stream();

// Of a stream that nobody else is given: NCCL has one for each communicator. PyTorch's pool of high priority
// gives out these, too.
int64_t own_stream_id();

// Whether an asynchronous copy may use that memory of the host after the call: it was allocated as pinned.
bool is_pinned(const void* address);

// Waits for it, counts that, and throws what has gone wrong on the device.
void synchronize(Stream& stream, uint64_t number);

struct Counters {
  std::atomic<uint64_t> launches{0}, synchronizations{0}, bytes_to_device{0}, bytes_to_host{0};
  std::atomic<uint64_t> digested{0}, digest_launches{0};  // bytes of contents, by our code for GPUs
  std::atomic<uint64_t> overlapping{0};  // kernels that began while one of another stream ran
};
Counters& counters();

}  // namespace understudy::simulated
