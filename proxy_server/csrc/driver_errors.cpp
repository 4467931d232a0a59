#include "proxy_server/csrc/driver_errors.h"

#include <cstring>

namespace understudy::server {
namespace {

// As cudaGetErrorString() words them and PyTorch passes them on, behind "CUDA error: ".
constexpr std::string_view kStickyErrors[] = {
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "unknown error",
};

}  // namespace

// A CPU's allocator raises no error of its own.
bool out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         std::strstr(error.what(), "DefaultCPUAllocator: can't allocate memory") != nullptr;
}

bool driver_error(std::string_view message) {
  return message.find("CUDA error: ") != std::string_view::npos &&
         message.find("CUDA error: out of memory") == std::string_view::npos;
}

std::string_view sticky_error(std::string_view message) {
  const size_t start = message.find("CUDA error: ");
  if (start == std::string_view::npos) return {};
  const std::string_view error = message.substr(start + sizeof("CUDA error: ") - 1);
  for (const std::string_view known : kStickyErrors)
    if (error.substr(0, known.size()) == known) return known;
  return {};
}

}  // namespace understudy::server
