#include "proxy_client/csrc/statistics.h"

#include <cstdlib>
#include <cstring>

namespace understudy::client {
namespace {
const bool enabled = [] {
  const char* text = std::getenv("UNDERSTUDY_STATISTICS");
  return text && std::strcmp(text, "1") == 0;
}();
}  // namespace

Statistics& statistics() noexcept {
  static Statistics counters;
  return counters;
}

bool statistics_enabled() noexcept { return enabled; }

}  // namespace understudy::client
