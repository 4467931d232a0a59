// What the device's memory is used for: asked of the device server, which owns it.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include "replay/csrc/log/log_format.h"

namespace understudy::client {

// One round trip; counts everything the script has done up to this call. All 0 while there is no session.
replay::MemoryStatistics query_memory(replay::MemoryQuery query);

// The same numbers as PyTorch's generic type has them.
c10::CachingDeviceAllocator::DeviceStats device_statistics(const replay::MemoryStatistics& memory);

}  // namespace understudy::client
