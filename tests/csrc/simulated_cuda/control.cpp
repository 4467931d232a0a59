// What tests ask of the simulated device in their own process, by ctypes.
#include <cstdint>

#include "tests/csrc/simulated_cuda/failures.h"
#include "tests/csrc/simulated_cuda/runtime.h"

namespace simulated = understudy::simulated;

extern "C" {

// So far, as simulated_device.Counters names them.
void simulated_cuda_counters(uint64_t* found) {
  const simulated::Counters& counters = simulated::counters();
  found[0] = counters.launches, found[1] = counters.synchronizations;
  found[2] = counters.bytes_to_device, found[3] = counters.bytes_to_host;
  found[4] = counters.digested, found[5] = counters.digest_launches;
  found[6] = counters.overlapping;
}

void simulated_cuda_fail(int place, uint64_t nth, int code) {
  simulated::fail_at(static_cast<simulated::Place>(place), nth, code);
}

// Something for the current stream of device 0 to do.
void simulated_cuda_enqueue(void (*run)(void*), void* argument) {
  simulated::stream(0, simulated::current_stream_id(0)).enqueue([run, argument] { run(argument); });
}
}
