// What a simulated CUDA device is to be like: from the environment of the process that loads it.
//
// A STAND-IN for tests: kernels are those of PyTorch's CPU build. Nothing measured on it is a result of a
// GPU.
#pragma once
#include <cstdint>
#include <string>

namespace understudy::simulated {

struct Settings {
  int devices;             // SIMULATED_CUDA_DEVICES, 1; of them CUDA_VISIBLE_DEVICES shows some
  uint64_t device_bytes;   // SIMULATED_CUDA_BYTES, 2 GiB: memory of each
  uint64_t item_delay_us;  // SIMULATED_CUDA_DELAY_US, 0: before each item of a stream
  const char* gone;  // SIMULATED_CUDA_GONE, none: a folder, where a file says that a device is (failures.h)
  const char*
      counters;        // SIMULATED_CUDA_COUNTERS, none: a folder, where each process has a file with its own
  const char* shared;  // SIMULATED_CUDA_SHARED, none: a folder, where processes on one GPU share its memory
  uint64_t copy_ns_per_kib;  // SIMULATED_CUDA_NS_PER_KIB, 0: of copies between host and device
};

const Settings& settings();
// The first one that this process sees, by its number: CUDA_VISIBLE_DEVICES may name it by its UUID.
std::string visible_gpu();

}  // namespace understudy::simulated
