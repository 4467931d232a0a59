#include "proxy_server/csrc/gpu/gpu_code.h"

#ifdef UNDERSTUDY_GPU_CODE
__asm__(
    ".section .rodata\n"
    ".balign 16\n"
    ".global understudy_gpu_code\n"
    ".hidden understudy_gpu_code\n"
    "understudy_gpu_code:\n"
    ".incbin \"" UNDERSTUDY_GPU_CODE
    "\"\n"
    ".previous\n");

extern "C" const unsigned char understudy_gpu_code[];

namespace understudy::server {
const void* gpu_code() { return understudy_gpu_code; }
}  // namespace understudy::server
#else
namespace understudy::server {
const void* gpu_code() { return nullptr; }
}  // namespace understudy::server
#endif
