#include "tests/csrc/simulated_cuda/settings.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace understudy::simulated {
namespace {

uint64_t number(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::stoull(text) : otherwise;
}

int visible(int devices) {
  const char* const text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return devices;
  const std::string shown = text;
  if (shown.empty()) return 0;
  return std::min(devices, static_cast<int>(std::count(shown.begin(), shown.end(), ',')) + 1);
}

}  // namespace

std::string visible_gpu() {
  const char* const text = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string shown = text != nullptr ? text : "0";
  return shown.starts_with("GPU-") ? std::to_string(std::stoi(shown.substr(4))) : shown;
}

const Settings& settings() {
  // Read when the device is first used: a device server sets what it sees after the fork.
  static const Settings read{visible(static_cast<int>(number("SIMULATED_CUDA_DEVICES", 1))),
                             number("SIMULATED_CUDA_BYTES", 2ull << 30),
                             number("SIMULATED_CUDA_DELAY_US", 0),
                             std::getenv("SIMULATED_CUDA_GONE"),
                             std::getenv("SIMULATED_CUDA_COUNTERS"),
                             std::getenv("SIMULATED_CUDA_SHARED"),
                             number("SIMULATED_CUDA_NS_PER_KIB", 0)};
  return read;
}

}  // namespace understudy::simulated
