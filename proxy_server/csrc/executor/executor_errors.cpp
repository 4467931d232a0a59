// Errors of a GPU, as the executor tells them: which records they are of, and what they mean for the process.
#include <unistd.h>

#include <cstdio>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/executor.h"

namespace understudy::server {

constexpr int kDriverLost = 86;  // exit status of a device server whose driver is lost

// The driver's context is lost, and with it all memory of the device: what proxyd does when a device server
// dies is what is needed now.
void Executor::end_with_the_driver(const Session& s, const std::exception& error) const {
  auto& page = s.log.page();
  const std::string name(sticky_error(error)), when = when_it_happened(s, error.what());
  std::snprintf(page.lost_message, sizeof page.lost_message, "CUDA error: %s%s", name.c_str(), when.c_str());
  std::fprintf(stderr,
               "understudy: the driver of %s is lost for this device server (%s)%s; it ends, and another one "
               "takes over\n",
               s.options.device.c_str(), name.c_str(), when.c_str());
  _exit(kDriverLost);
}

// Errors of a GPU come to light at whatever record looks next.
std::string Executor::when_it_happened(const Session& s, const std::string& message) const {
  if (!s.driver.device().is_cuda() || message.find("CUDA error: ") == std::string::npos) return {};
  return " [in one of the records " + std::to_string(s.checked_index) + " to " + std::to_string(s.at.index) +
         "; CUDA_LAUNCH_BLOCKING=1 in the script's environment finds out in which]";
}

}  // namespace understudy::server
