// Errors of a driver that nothing in the process survives.
#pragma once
#include <string_view>

namespace understudy::server {

// The part of `message` that names an error after which every further call of the driver fails in this
// process, so that only another device server can go on; empty if there is none.
std::string_view sticky_error(std::string_view message);

}  // namespace understudy::server
