// Faults injected on purpose, at exact records (recovery/drills/fault_table.py says what each is for).
#include <signal.h>
#include <unistd.h>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/rank_execution.h"
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

void RankExecution::load_drills() {
  const auto page = log_.server_page();
  const uint32_t n =
      std::min<uint32_t>(page.daemon().drill_count.load(std::memory_order_acquire), replay::kMaxDrills);
  drills_.clear();
  for (uint32_t i = 0; i < n; i++)
    if (page.shared().drills[i].state.load() == number(DrillState::kArmed))
      drills_.emplace_back(page.shared().drills[i].step, page.shared().drills[i].call);
  if (sticky_error_ || slow_step_ != 0) drills_.emplace_back(0, 0);  // every record has to look
  drills_seen_ = page.daemon().drill_count.load();
}

void RankExecution::fire_drills(const Record& r) {
  const auto page = log_.server_page();
  if (sticky_error_) throw DriverError(injected("a sticky driver error", call_name(r), r));
  if (slow_step_ == at_.steps + 1) usleep(kSlowerUs);
  if (page.daemon().drill_count.load(std::memory_order_relaxed) != drills_seen_) load_drills();
  for (uint32_t i = 0; i < std::min<uint32_t>(drills_seen_, replay::kMaxDrills); i++) {
    Drill& d = page.shared().drills[i];
    if (d.state.load() != number(DrillState::kArmed)) continue;
    if (d.step != 0 && (d.step != at_.steps + 1 || d.call != at_.call)) continue;
    d.fired_at_ns = replay::now_ns();
    d.state.store(number(DrillState::kFired), std::memory_order_release);
    fire_drill(r, d);
  }
}

void RankExecution::fire_drill(const Record& r, Drill& drill) {
  const auto page = log_.server_page();
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
      throw DriverError(injected("a driver error", call_name(r), r));
    case DrillKind::kStickyError:
      sticky_error_ = true;
      throw DriverError(injected("a sticky driver error", call_name(r), r));
    case DrillKind::kDriverSuspect:
      throw DriverError(injected("the driver is suspect", call_name(r), r), /*suspect=*/true);
    case DrillKind::kCollectiveHang:
      return communicators_.hang_once();
    case DrillKind::kNetworkPartition:
      page.server().partitioned_until_ns.store(replay::now_ns() + kPartitionNs);
      return communicators_.cut_off();
    case DrillKind::kLastingPartition:
      page.server().partitioned_until_ns.store(~0ull);
      return communicators_.cut_off();
    case DrillKind::kDeviceGone:
      std::snprintf(page.server().device_message, sizeof page.server().device_message, "%s",
                    injected("the device does not answer any more", call_name(r), r).c_str());
      page.server().device_lost.store(1, std::memory_order_release);
      _exit(kDeviceGone);
    case DrillKind::kBitFlip:
      drill.detail = state_.flip_bit();
      return;
    case DrillKind::kSlowRank:
      slow_step_ = at_.steps + 1;
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
