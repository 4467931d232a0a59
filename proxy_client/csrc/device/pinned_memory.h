// Host memory that says it is pinned. It is ordinary memory: transfers copy through the log anyway.
#pragma once
#include <c10/core/Allocator.h>

namespace understudy::client {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// cudaHostRegister and cudaHostUnregister, with the same error codes: memory of the program's own says that
// it is pinned.
int register_host_memory(uintptr_t address, size_t bytes);
int unregister_host_memory(uintptr_t address);

}  // namespace understudy::client
