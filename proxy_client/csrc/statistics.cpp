#include "proxy_client/csrc/statistics.h"

#include <cstdlib>
#include <cstring>

namespace understudy::client {
namespace detail {
const bool statistics_on = [] {
  const char* text = std::getenv("UNDERSTUDY_STATISTICS");
  return text && std::strcmp(text, "1") == 0;
}();
}  // namespace detail

Statistics& statistics() noexcept {
  static Statistics counters;
  return counters;
}

bool statistics_enabled() noexcept { return detail::statistics_on; }

}  // namespace understudy::client
