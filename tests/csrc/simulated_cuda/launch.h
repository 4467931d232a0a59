// Kernels of the CPU on streams of the simulated device.
#pragma once
#include <torch/library.h>

namespace understudy::simulated {

// Registered for an operator it runs the CPU's kernel of it.
torch::CppFunction launched();

}  // namespace understudy::simulated
