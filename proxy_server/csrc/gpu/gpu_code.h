// Code of ours for a GPU (gpu/*.cu), as nvcc made it for several generations; the driver chooses.
#pragma once

namespace understudy::server {

// None where there was no nvcc when this was built.
const void* gpu_code();

}  // namespace understudy::server
