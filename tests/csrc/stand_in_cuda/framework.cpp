// What PyTorch does around a collective, on the STAND-IN: the collective on a stream of its own, an event
// behind it, and the default stream, where everything else is computed, waits for that event.
//
// Python loads this in a scope of its own, as it loads PyTorch: the runtime is not in the global one.
#include "tests/csrc/stand_in_cuda/stand_in.h"

namespace {

constexpr Stream kCompute = nullptr;
Stream communication = nullptr;
Event behind = nullptr;
unsigned char parameters[256];  // on the device

}  // namespace

extern "C" {

void framework_open() {
  cudaStreamCreateWithFlags(&communication, kNonBlocking);
  cudaEventCreateWithFlags(&behind, kDisableTiming);
}

// Enqueues, and goes on.
void framework_reduce_gradients() {
  ncclAllReduce(nullptr, nullptr, 0, 0, 0, nullptr, communication);
  cudaEventRecord(behind, communication);
  cudaStreamWaitEvent(kCompute, behind, 0);
}
void framework_update_parameters(int value) {
  cudaMemsetAsync(parameters, value, sizeof parameters, kCompute);
}
void framework_synchronize() { cudaStreamSynchronize(kCompute); }

Error framework_copy_out(unsigned char* to) { return cudaMemcpy(to, parameters, sizeof parameters, 2); }
std::size_t framework_size() { return sizeof parameters; }

// The peer of the next collective does not come, or does after all.
void framework_lose_peer(bool lost) { stand_in_gate(communication, lost); }
std::uint64_t framework_device_synchronizations() { return stand_in_counters().device_synchronizations; }
}
