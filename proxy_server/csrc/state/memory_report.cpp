#include "proxy_server/csrc/state/memory_report.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace understudy::server {
namespace {

using replay::MemoryCounter;
using replay::MemoryQuery;
using replay::MemoryStatistics;

// Bytes that could be had without swapping (MemAvailable of /proc/meminfo, which counts kB).
uint64_t available_host_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (uint64_t kilobytes = 0; file >> name >> kilobytes; std::getline(file, unit))
    if (name == "MemAvailable:") return kilobytes << 10;
  return 0;
}

MemoryStatistics report_host(MemoryQuery query, DeviceState& state, const Driver& driver) {
  replay::Usage& usage = state.table().usage();
  if (query == MemoryQuery::kResetPeak) usage.reset_peak();
  if (query == MemoryQuery::kResetAccumulated) usage.reset_accumulated();
  if (query == MemoryQuery::kEmptyCache) {
    state.drop_spare_storages();
    driver.give_back_freed_memory();
  }
  MemoryStatistics s{usage.bytes(), usage.blocks(), usage.bytes(), 0, 0};
  const uint64_t kept = state.table().undo_bytes() + state.spare_storage_bytes();
  s.reserved.current += kept;
  s.reserved.peak = std::max(s.reserved.peak, s.reserved.current);
  s.total_bytes =
      static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) * static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
  s.free_bytes = std::min(available_host_memory(), s.total_bytes);
  return s;
}

MemoryCounter counter(const c10::CachingAllocator::StatArray& pools) {
  const auto& all = pools[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {static_cast<uint64_t>(all.current), static_cast<uint64_t>(all.peak),
          static_cast<uint64_t>(all.allocated), static_cast<uint64_t>(all.freed)};
}

MemoryStatistics report_device(MemoryQuery query, const Driver& driver) {
  const c10::Device device = driver.device();
  auto* allocator = c10::getDeviceAllocator(device.type());
  if (query == MemoryQuery::kResetPeak) allocator->resetPeakStats(device.index());
  if (query == MemoryQuery::kResetAccumulated) allocator->resetAccumulatedStats(device.index());
  if (query == MemoryQuery::kEmptyCache) driver.give_back_freed_memory();
  const auto stats = allocator->getDeviceStats(device.index());
  const auto [free_bytes, total_bytes] = allocator->getMemoryInfo(device.index());
  return {counter(stats.allocated_bytes), counter(stats.allocation), counter(stats.reserved_bytes),
          static_cast<uint64_t>(free_bytes), static_cast<uint64_t>(total_bytes)};
}

}  // namespace

MemoryStatistics report_memory(MemoryQuery query, DeviceState& state, const Driver& driver) {
  if (static_cast<uint64_t>(query) >= replay::kMemoryQueries) throw replay::LogError("unknown memory query");
  return driver.device().is_cpu() ? report_host(query, state, driver) : report_device(query, driver);
}

}  // namespace understudy::server
