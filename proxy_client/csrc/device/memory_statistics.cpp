#include "proxy_client/csrc/device/memory_statistics.h"

#include <cstring>

#include "proxy_client/csrc/session.h"

namespace understudy::client {

using replay::MemoryCounter;
using replay::MemoryStatistics;

MemoryStatistics query_memory(replay::MemoryQuery query) {
  MemoryStatistics memory{};
  LogWriter* log = log_if_open();
  if (!log) return memory;
  call(
      *log, Kind::kMemory, static_cast<uint64_t>(query), 0, [](uint64_t*) {},
      [&](const uint8_t* payload, size_t bytes) {
        TORCH_CHECK(bytes == sizeof memory, "the device server's report on memory has ", bytes, " bytes");
        std::memcpy(&memory, payload, sizeof memory);
      });
  return memory;
}

c10::CachingDeviceAllocator::DeviceStats device_statistics(const MemoryStatistics& memory) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto fill = [](c10::CachingAllocator::StatArray& pools, const MemoryCounter& counter) {
    auto& all = pools[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = static_cast<int64_t>(counter.current);
    all.peak = static_cast<int64_t>(counter.peak);
    all.allocated = static_cast<int64_t>(counter.allocated);
    all.freed = static_cast<int64_t>(counter.freed);
  };
  for (auto* pools : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes})
    fill(*pools, memory.bytes);
  for (auto* pools : {&stats.allocation, &stats.active}) fill(*pools, memory.blocks);
  fill(stats.reserved_bytes, memory.reserved);
  return stats;
}

}  // namespace understudy::client
