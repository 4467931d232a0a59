// What cannot be gone on with: which records a GPU's error is of, and what it ends, a session or the process.
#include <unistd.h>

#include <cstdio>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/rank_execution.h"
#include "replay/csrc/log/futex.h"

namespace understudy::server {

constexpr int kDriverLost = 86;  // exit status of a device server whose driver is lost

// A record we cannot trust: this session ends, no other is harmed.
void RankExecution::end_session(const std::exception& error) {
  if (driver_.lost(error)) end_with_the_driver(error);
  const auto page = log_.server_page();
  std::snprintf(page.shared().lost_message, sizeof page.shared().lost_message,
                "the device server refused record %llu: %s", static_cast<unsigned long long>(at_.index),
                error.what());
  page.shared().session_state.store(static_cast<uint32_t>(replay::SessionState::kLost),
                                    std::memory_order_release);
  for (auto* futex : {&page.shared().reply_futex, &page.shared().freed_futex}) {
    futex->fetch_add(1);
    replay::futex_wake(*futex);
  }
}

// The driver's context is lost, and with it all memory of the device: what proxyd does when a device server
// dies is what is needed now.
void RankExecution::end_with_the_driver(const std::exception& error) const {
  const auto page = log_.server_page();
  const std::string name(sticky_error(error)), when = when_it_happened(error.what());
  std::snprintf(page.shared().lost_message, sizeof page.shared().lost_message, "CUDA error: %s%s",
                name.c_str(), when.c_str());
  std::fprintf(stderr,
               "understudy: the driver of %s is lost for this device server (%s)%s; it ends, and another one "
               "takes over\n",
               options_.device.c_str(), name.c_str(), when.c_str());
  _exit(kDriverLost);
}

// Errors of a GPU come to light at whatever record looks next.
std::string RankExecution::when_it_happened(const std::string& message) const {
  if (!driver_.device().is_cuda() || message.find("CUDA error: ") == std::string::npos) return {};
  return " [in one of the records " + std::to_string(checked_index_) + " to " + std::to_string(at_.index) +
         "; CUDA_LAUNCH_BLOCKING=1 in the script's environment finds out in which]";
}

}  // namespace understudy::server
