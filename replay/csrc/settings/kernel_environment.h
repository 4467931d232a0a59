// Environment variables that choose kernels, and with them bits, and those that say how a GPU's memory and
// launches are handled. PyTorch and its libraries read them when they first need them: the worker says what
// its script has, and a device server, which has run no kernel before its session, has the same.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

inline constexpr std::string_view kLaunchBlocking = "CUDA_LAUNCH_BLOCKING";
inline constexpr std::string_view kAllocator = "PYTORCH_ALLOC_CONF";
inline constexpr std::string_view kAllocatorOfCuda = "PYTORCH_CUDA_ALLOC_CONF";  // its former name

// What --exact strict makes of NCCL's: rings and trees add in other orders, and its protocols divide what
// they add in other ways; which it takes depends on where its ranks are.
inline constexpr std::string_view kStrictNccl[] = {"NCCL_ALGO=Ring", "NCCL_PROTO=Simple"};

// By their beginnings: each library has many, and new ones come. What names a host's network, and not an
// order of additions, is proxyd's (NCCL_SOCKET_IFNAME, NCCL_IB_HCA); threads are a setting.
inline bool is_for_the_device(std::string_view name) {
  static constexpr std::string_view beginnings[] = {
      "ATEN_CPU_",     "CUBLASLT_",     "CUBLAS_",           "CUDNN_",
      "CUFFT_",        "CUSOLVER_",     "CUSPARSE_",         "DNNL_",
      "FBGEMM_",       "MKL_",          "NCCL_ALGO",         "NCCL_BUFFSIZE",
      "NCCL_COLLNET_", "NCCL_LL",       "NCCL_MAX_",         "NCCL_MIN_",
      "NCCL_NTHREADS", "NCCL_NVLS_",    "NCCL_PROTO",        "NCCL_THREAD_",
      "NVIDIA_TF32_",  "ONEDNN_",       "TORCH_ALLOW_TF32_", "TORCH_BLAS_",
      "TORCH_CUDNN_",  "TORCH_LINALG_", "TORCH_LINEAR_",     "TORCH_MKLDNN_",
  };
  if (name == "MKL_NUM_THREADS") return false;
  if (name == kLaunchBlocking || name == kAllocator || name == kAllocatorOfCuda) return true;
  return std::any_of(std::begin(beginnings), std::end(beginnings), [&](std::string_view beginning) {
    return name.substr(0, beginning.size()) == beginning;
  });
}

// "NAME=value" of each that this process has, in order.
inline std::vector<std::string> kernel_environment() {
  std::vector<std::string> found;
  for (char** at = environ; at != nullptr && *at != nullptr; at++) {
    const std::string_view entry = *at;
    if (const size_t end = entry.find('='); end != entry.npos && is_for_the_device(entry.substr(0, end)))
      found.emplace_back(entry);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// With a zero byte behind each, as it is in records and manifests; whole words.
inline std::string environment_text(const std::vector<std::string>& entries) {
  std::string text;
  for (const std::string& entry : entries) (text += entry) += '\0';
  text.resize((text.size() + 7) / 8 * 8);
  return text;
}

// Throws LogError if it says anything of other variables.
inline std::vector<std::string> read_environment(std::string_view text) {
  constexpr size_t kMostBytes = 64 << 10;
  if (text.size() > kMostBytes) throw LogError("the environment of a session is too large");
  std::vector<std::string> entries;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\0'), text.size());
    if (const std::string_view entry = text.substr(0, end); !entry.empty()) {
      if (const size_t equals = entry.find('=');
          equals == entry.npos || !is_for_the_device(entry.substr(0, equals)))
        throw LogError("a session's environment names a variable that is not for the device");
      entries.emplace_back(entry);
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return entries;
}

}  // namespace understudy::replay
