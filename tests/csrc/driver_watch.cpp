// A libcuda.so.1 for machines without one: writes a line into a file whenever a process calls the driver.
//
// Some libraries of CUDA load libcuda when they are loaded themselves. That alone calls nothing: the runtime
// does, at its first use.
#include <cstdio>
#include <cstdlib>

namespace {

int call() {
  if (const char* path = std::getenv("DRIVER_WATCH_FILE"))
    if (FILE* file = std::fopen(path, "a")) {
      std::fputs("called\n", file);
      std::fclose(file);
    }
  return 100;  // CUDA_ERROR_NO_DEVICE
}

}  // namespace

extern "C" {
int cuInit(unsigned) { return call(); }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetProcAddress(const char*, void** function, int, unsigned long) {
  *function = reinterpret_cast<void*>(&call);
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* status) {
  if (status != nullptr) *status = 0;
  return cuGetProcAddress(name, function, version, flags);
}
}
