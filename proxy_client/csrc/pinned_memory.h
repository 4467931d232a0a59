// Host memory that says it is pinned. It is ordinary memory: transfers copy through the log anyway.
#pragma once
#include <c10/core/Allocator.h>

namespace understudy::client {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace understudy::client
