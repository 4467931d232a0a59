// Whether a device still computes, asked before a rank's state goes to it.
#pragma once
#include <c10/core/Device.h>

namespace understudy::server {

// Takes memory of it, runs two kernels, and compares what comes back with what the host computes. Raises
// what the driver says, or c10::Error where numbers differ. A device that is gone may keep it for ever.
void try_device(c10::Device device);

}  // namespace understudy::server
