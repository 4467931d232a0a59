// A libcuda.so.1 whose device is the simulated one: it takes our code for GPUs, and has that device run what
// it does. With SIMULATED_CUDA_OLD_DRIVER it is older than the code.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr uint32_t kFatbin = 0xBA55ED50;  // the first word of what nvcc makes
constexpr int kNoDevice = 100, kInvalidImage = 200, kTooNew = 222, kNotFound = 500;
const char* const kFunctions[] = {"piece_digests", "gather"};

}  // namespace

extern "C" {

int cuModuleLoadData(void** module, const void* image) {
  uint32_t word;
  std::memcpy(&word, image, sizeof word);
  if (word != kFatbin) return kInvalidImage;
  if (std::getenv("SIMULATED_CUDA_OLD_DRIVER") != nullptr) return kTooNew;
  *module = const_cast<void*>(image);
  return 0;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
  for (const char* known : kFunctions)
    if (std::strcmp(known, name) == 0) {
      *function = const_cast<char*>(known);
      return 0;
    }
  return kNotFound;
}

int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned, void*, void** arguments, void**) {
  using Launch = int (*)(const char*, unsigned, void**);
  const auto launch = reinterpret_cast<Launch>(dlsym(RTLD_DEFAULT, "simulated_driver_launch"));
  return launch == nullptr ? kNoDevice : launch(static_cast<const char*>(function), blocks, arguments);
}

int cuGetErrorName(int code, const char** name) {
  *name = code == kTooNew ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
}
