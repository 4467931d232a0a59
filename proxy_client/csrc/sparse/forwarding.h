// How composite tensors' operators are registered: own kernels, and everything else forwarded whole.
#pragma once
#include <torch/library.h>

#include <vector>

#include "proxy_client/csrc/operators/own_kernel.h"

namespace understudy::client {

torch::CppFunction forward_composites();

// Own kernels, and for every other operator that has a kernel for this kind of tensor on the CPU (the rest
// comes through the fallback or is composed of these): the driver sees it whole. A CUDA build has kernels of
// its own at `key`, the library's: they go too.
void register_all(torch::Library& library, std::vector<OwnKernel> own, c10::DispatchKey driver_key,
                  c10::DispatchKey key);

}  // namespace understudy::client
