#include "proxy_server/csrc/driver/driver_errors.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace understudy::server {
namespace {

struct StickyError {
  int code;
  std::string_view name;
};

// As cudaGetErrorString() of CUDA 13.0 words them and PyTorch passes them on, behind "CUDA error: ".
constexpr StickyError kStickyErrors[] = {
    {46, "CUDA-capable device(s) is/are busy or unavailable"},
    {201, "invalid device context"},
    {214, "uncorrectable ECC error encountered"},
    {220, "uncorrectable NVLink error detected during the execution"},
    {226, "Invalid access of peer GPU memory over nvlink or a hardware error"},
    {700, "an illegal memory access was encountered"},
    {702, "the launch timed out and was terminated"},
    {709, "context is destroyed"},
    {710, "device-side assert triggered"},
    {714, "hardware stack error"},
    {715, "an illegal instruction was encountered"},
    {716, "misaligned address"},
    {717, "operation not supported on global/shared address space"},
    {718, "invalid program counter"},
    {719, "unspecified launch failure"},
    {721, "tensor memory not completely freed"},
    {810, "the MPS client has been terminated by the server"},
    {911, "an async error has occured in external entity outside of CUDA"},
    {999, "unknown error"},
};

// How libraries begin an error of theirs, of which the device may be the cause.
constexpr std::string_view kLibraryErrors[] = {
    "cuDNN error: ",    "cuDNN Frontend error: ", "cuFFT error: ",
    "cusolver error: ", "CUDA driver error: ",    "unhandled cuda error",
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
  for (const auto& [code, known] : kStickyErrors)
    if (error.substr(0, known.size()) == known) return known;
  return {};
}

std::string_view sticky_error(const std::exception& error) {
  if (const auto* coded = dynamic_cast<const c10::AcceleratorError*>(&error))
    for (const auto& [code, name] : kStickyErrors)
      if (coded->get_error_code() == code) return name;
  return sticky_error(std::string_view(error.what()));
}

std::vector<std::pair<int, std::string_view>> sticky_errors() {
  std::vector<std::pair<int, std::string_view>> all;
  for (const auto& [code, name] : kStickyErrors) all.emplace_back(code, name);
  return all;
}

bool library_error(std::string_view message) {
  return std::any_of(std::begin(kLibraryErrors), std::end(kLibraryErrors), [&](std::string_view beginning) {
    return message.find(beginning) != std::string_view::npos;
  });
}

}  // namespace understudy::server
