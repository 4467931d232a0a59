// What happens when host code follows a device pointer: one sentence, then the fault takes its course.
#pragma once
#include <cstddef>

namespace understudy::client {

// From now on a touch of this range by the host is explained on stderr before whoever handled SIGSEGV so far
// handles it.
void watch_host_access(const void* begin, size_t bytes);

// To be called after faulthandler was enabled or disabled: ours goes first again, and passes on to it or past
// it.
void renew_host_access_watch(bool faulthandler_is_enabled);

}  // namespace understudy::client
