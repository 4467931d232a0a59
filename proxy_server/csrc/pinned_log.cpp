#include "proxy_server/csrc/pinned_log.h"

#include <dlfcn.h>

#include <cstdio>

namespace understudy::server {
namespace {

// PyTorch loads the runtime for everybody; a CPU build has none, and we are the same library in both.
template <class Function>
Function* runtime_function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

using Register = int(void* address, size_t bytes, unsigned flags);
using Unregister = int(void* address);
constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: for the contexts of all devices

}  // namespace

void PinnedLog::pin(void* segment) {
  if (device_.is_cpu() || refused_ || pinned_.count(segment) != 0) return;
  auto* function = runtime_function<Register>("cudaHostRegister");
  const int status = function == nullptr ? -1 : function(segment, segment_bytes_, kPortable);
  if (status == 0) {
    pinned_.insert(segment);
    return;
  }
  refused_ = true;
  // The runtime keeps the status for the next call that asks; it is no error of the program.
  if (auto* forget = runtime_function<int()>("cudaGetLastError")) forget();
  std::fprintf(
      stderr,
      "understudy: the log cannot be pinned for the GPU (cudaHostRegister: %d); copies to the device "
      "will not overlap computation. Is the limit on locked memory too low (ulimit -l)?\n",
      status);
}

PinnedLog::~PinnedLog() {
  if (auto* function = runtime_function<Unregister>("cudaHostUnregister"))
    for (void* segment : pinned_) function(segment);
}

}  // namespace understudy::server
