// Faults injected on purpose, at exact records (recovery/drills/fault_table.py says what each is for).
#include <signal.h>
#include <unistd.h>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/executor.h"
#include "replay/csrc/log/futex.h"

namespace understudy::server {

using replay::Drill;
using replay::DrillKind;
using replay::DrillState;
using replay::Record;

namespace {

constexpr int kDeviceGone = 87;                     // exit status of a device server whose device is gone
constexpr uint64_t kPartitionNs = 1500000000ull;    // until a partition that heals has healed
constexpr useconds_t kSlowerUs = 2000;              // per record of a slow rank
constexpr uint64_t kProxydPatienceNs = 5000000000;  // proxyd looks every few milliseconds
constexpr useconds_t kDrillLookUs = 500;

uint32_t number(DrillState state) { return static_cast<uint32_t>(state); }

std::string injected(const std::string& what, const std::string& name, const Record& r) {
  return what + ", injected by a drill [device call " + name + ", record " + std::to_string(r.index) + "]";
}

}  // namespace

void Executor::load_drills(Session& s) {
  auto& page = s.log.page();
  const uint32_t n = std::min<uint32_t>(page.drill_count.load(std::memory_order_acquire), replay::kMaxDrills);
  s.drills.clear();
  for (uint32_t i = 0; i < n; i++)
    if (page.drills[i].state.load() == number(DrillState::kArmed))
      s.drills.emplace_back(page.drills[i].step, page.drills[i].call);
  if (s.sticky_error || s.slow_step != 0) s.drills.emplace_back(0, 0);  // every record has to look
  s.drills_seen = page.drill_count.load();
}

void Executor::fire_drills(Session& s, const Record& r) {
  auto& page = s.log.page();
  if (s.sticky_error) throw DriverError(injected("a sticky driver error", call_name(s, r), r));
  if (s.slow_step == s.at.steps + 1) usleep(kSlowerUs);
  if (page.drill_count.load(std::memory_order_relaxed) != s.drills_seen) load_drills(s);
  for (uint32_t i = 0; i < std::min<uint32_t>(s.drills_seen, replay::kMaxDrills); i++) {
    Drill& d = page.drills[i];
    if (d.state.load() != number(DrillState::kArmed)) continue;
    if (d.step != 0 && (d.step != s.at.steps + 1 || d.call != s.at.call)) continue;
    d.fired_at_ns = replay::now_ns();
    d.state.store(number(DrillState::kFired), std::memory_order_release);
    fire_drill(s, r, d);
  }
}

void Executor::fire_drill(Session& s, const Record& r, Drill& drill) {
  auto& page = s.log.page();
  switch (static_cast<DrillKind>(drill.kind)) {
    case DrillKind::kNone:
      return;
    case DrillKind::kKillServer:
      kill(getpid(), SIGKILL);
      return;
    case DrillKind::kStopServer:
      raise(SIGSTOP);  // to this very thread, so that it stops here and not some records later
      return;
    case DrillKind::kCallError:
      throw DriverError(injected("a driver error", call_name(s, r), r));
    case DrillKind::kStickyError:
      s.sticky_error = true;
      throw DriverError(injected("a sticky driver error", call_name(s, r), r));
    case DrillKind::kDriverSuspect:
      throw DriverError(injected("the driver is suspect", call_name(s, r), r), /*suspect=*/true);
    case DrillKind::kCollectiveHang:
      return s.communicators.hang_once();
    case DrillKind::kNetworkPartition:
      page.partitioned_until_ns.store(replay::now_ns() + kPartitionNs);
      return s.communicators.cut_off();
    case DrillKind::kLastingPartition:
      page.partitioned_until_ns.store(~0ull);
      return s.communicators.cut_off();
    case DrillKind::kDeviceGone:
      std::snprintf(page.device_message, sizeof page.device_message, "%s",
                    injected("the device does not answer any more", call_name(s, r), r).c_str());
      page.device_lost.store(1, std::memory_order_release);
      _exit(kDeviceGone);
    case DrillKind::kBitFlip:
      drill.detail = s.state->flip_bit();
      return;
    case DrillKind::kSlowRank:
      s.slow_step = s.at.steps + 1;
      return;
    case DrillKind::kKillSpare:
    case DrillKind::kKillAllServers:
    case DrillKind::kKillProxyd:
    case DrillKind::kKillWorker:
      for (const uint64_t until = replay::now_ns() + kProxydPatienceNs; replay::now_ns() < until;) {
        if (drill.state.load() == number(DrillState::kDone) || requests_.to_park()) return;
        usleep(kDrillLookUs);
      }
      return;
  }
}

}  // namespace understudy::server
