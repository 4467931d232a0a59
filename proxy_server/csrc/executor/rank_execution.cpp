#include "proxy_server/csrc/executor/rank_execution.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "replay/csrc/log/futex.h"

namespace understudy::server {

using replay::Kind;
using replay::LogError;
using replay::Record;

namespace {

constexpr uint64_t kPressurePatienceNs = 5000000000ull;  // before a full log is cut without its peers
constexpr long kLongestSleepMs = 64;
constexpr long kFirstSleepMs = 1, kPoliteFirstSleepMs = 8;  // work that nobody waits for is begun no later
constexpr uint64_t kSnapshotPortion = 1 << 20;              // bytes; a record that arrives waits for no more
constexpr useconds_t kStepLookUs = 20;
constexpr useconds_t kDeviceLookUs = 50;      // while the script waits for it
constexpr int kFirstLooks = 64, kLooks = 50;  // between looks at the clock
constexpr uint64_t kSpinNs = 200000;
constexpr uint64_t kYieldNs = 4000000;
constexpr uint64_t kCrowdedNs = 20000;  // to offer the core takes longer than this only if somebody takes it

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// This thread, as it wakes up, lets whoever runs on its core go on (sched(7), SCHED_BATCH). A policy that an
// operator has chosen stays.
void take_no_core_away() {
  const sched_param none{};
  if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
}

}  // namespace

RankExecution::RankExecution(const AttachOptions& options, const BackendFactory& factory, Requests& requests)
    : requests_(requests),
      log_(options.log_directory),
      driver_(options.device),
      communicators_(driver_, log_, factory),
      state_(driver_, log_, options.policy, communicators_, options.threads),
      options_(options),
      validation_(log_.server_page()),
      passed_(log_.server_page(), driver_) {
  communicators_.set_generation(options.generation);
  driver_.before_waiting([this](const auto& over) { communicators_.wait_for_queued(over); });
}

uint64_t RankExecution::rewind(uint64_t commit) { return stand_at(state_.rewind(commit)); }

uint64_t RankExecution::restore(uint64_t commit) { return stand_at(state_.restore(commit)); }

uint64_t RankExecution::restore_snapshot(uint64_t commit) {
  return stand_at(state_.restore_snapshot(commit));
}

void RankExecution::roll_forward(const RollForward::Contents& contents) {
  roll_.begin(contents, state_);
  rolling_.store(true);
}

uint64_t RankExecution::stand_at(const std::pair<Position, uint64_t>& result) {
  at_ = result.first;
  roll_ = {};
  step_digest_.reset();
  rolling_.store(false);
  commit_pending_ = in_step_ = false;
  pending_since_ = 0;
  passed_.stand_at(at_.index);
  page().server().cursor_index.store(at_.index);
  page().server().cursor.store(at_.offset);
  return result.second;
}

void RankExecution::wake() {
  const auto page = log_.server_page();
  page.shared().tail_futex.fetch_add(1);
  replay::futex_wake(page.shared().tail_futex);
}

void RankExecution::end_running() {
  state_.end_running();
  page().server().sealed.store(state_.table().sealed() ? 1 : 0, std::memory_order_release);
}

Driver RankExecution::close() {
  communicators_.close();
  driver_.synchronize();  // nothing may still read the log when it goes
  return driver_;
}

bool RankExecution::run_records() {
  driver_.enter_thread();
  const auto page = log_.server_page();
  state_.begin_running();
  load_drills();
  // Spin only where this rank has two cores to itself (worker and server).
  spins_ = available_cores() >= 2 * static_cast<int>(page.fixed().world);
  yields_ = !spins_ && driver_.device().is_cpu();
  if (yields_) take_no_core_away();
  page.server().step.store(at_.steps + 1);
  page.server().call.store(at_.call);
  step_offset_ = last_commit_offset_ = at_.offset;
  begin_minibatch();
  const uint64_t much = replay::automatic_commit_bytes(page.fixed());
  uint64_t tail = page.worker().tail.load(std::memory_order_acquire);
  replay::LogReader reader(log_);
  for (;;) {
    if (at_.offset == tail && !wait_for_records(tail)) {
      if (stands_here()) {
        complete_commit();
        return false;
      }
      passed_.idle(at_.index);  // the script may wait for what it goes on with
      usleep(kStepLookUs);      // the rest of the step is on its way
      tail = page.worker().tail.load(std::memory_order_acquire);
      continue;
    }
    if (__builtin_expect(requests_.to_park(std::memory_order_relaxed), 0) && stands_here()) {
      complete_commit();
      return false;
    }
    const auto [r, body] = reader.read(at_.offset, tail);
    if (r.index != at_.index)
      throw LogError("record " + std::to_string(at_.index) + " carries number " + std::to_string(r.index));
    const uint64_t bytes = r.bytes;
    const auto kind = static_cast<Kind>(r.kind);
    if (__builtin_expect(validation_.active(), 0) && ends_validation(r)) validate();
    if (kind != Kind::kPad) {
      begin_record(r, body);
      run_record(r, body + r.frees);
    }
    at_.offset += bytes;
    at_.index++;
    at_.frees_done = false;
    page.server().cursor_index.store(at_.index, std::memory_order_relaxed);
    page.server().cursor.store(at_.offset, std::memory_order_relaxed);
    passed_.given(at_.index);
    if ((at_.index & 63) == 0) {
      page.server().progress_ns.store(replay::now_ns(), std::memory_order_relaxed);
      state_.advance_snapshot(kSnapshotPortion);
    }
    if (kind == Kind::kEnd) return true;
    // Long stretches without an optimizer step (evaluation, generation): the log must not grow for ever.
    // Where the program reads a value, as a rule: there its ranks stand at the same place.
    const uint64_t uncommitted = at_.offset - last_commit_offset_;
    if (__builtin_expect(uncommitted > much, 0) && (replay::is_sync(kind) || uncommitted > 2 * much) &&
        !commit_pending_ && communicators_.settled(state_.table()) &&
        page.server().phase.load(std::memory_order_relaxed) ==
            static_cast<uint32_t>(replay::Phase::kForwardBackward))
      make_commit(at_);
  }
}

// Waits until tail > at_.offset. False: asked to park.
bool RankExecution::wait_for_records(uint64_t& tail) {
  const auto page = log_.server_page();
  const auto arrived = [&] {
    tail = page.worker().tail.load(std::memory_order_seq_cst);
    return tail != at_.offset;
  };
  page.server().cursor.store(at_.offset, std::memory_order_release);
  while (state_.advance_snapshot(kSnapshotPortion) && !requests_.to_park(std::memory_order_relaxed))
    if (arrived()) return true;
  for (int i = 0; i < kFirstLooks && spins_; i++) {
    if (arrived()) return true;
    replay::cpu_relax();
  }
  const uint64_t idle_since = replay::now_ns();
  page.server().progress_ns.store(idle_since, std::memory_order_relaxed);
  uint64_t now = idle_since;
  for (; spins_ && now < idle_since + kSpinNs; now = replay::now_ns(), passed_.idle(at_.index))
    for (int i = 0; i < kLooks; i++) {
      if (arrived()) return true;
      replay::cpu_relax();
    }
  // To be woken takes 50 us and more. A worker whose last pause was short will be back soon: wait for it,
  // but leave the core to whoever else wants it, and then sleep: who waits awake is served late.
  for (uint64_t before = now;
       spins_ && short_pause_ && now < idle_since + kYieldNs && now - before < kCrowdedNs;
       now = replay::now_ns()) {
    if (arrived()) return true;
    if (requests_.to_park(std::memory_order_relaxed)) return false;
    before = now;
    passed_.idle(at_.index);
    sched_yield();
  }
  // Where cores are scarce, to wake by oneself takes the worker's from it, and nothing is gained: it wakes us
  // for 32 KiB and for whatever anybody waits for. But it may itself be waiting, for data.
  for (long sleep_ms = yields_ ? kPoliteFirstSleepMs : kFirstSleepMs;;
       sleep_ms = std::min(2 * sleep_ms, kLongestSleepMs)) {
    const uint32_t seen =
        page.shared().tail_futex.load();  // first: what is asked behind this look ends the sleep
    if (requests_.to_park()) return false;
    state_.advance_snapshot(kSnapshotPortion);  // its copier may have ended before it could wake us
    page.shared().server_sleeping.store(1, std::memory_order_seq_cst);
    if (passed_.idle(at_.index))
      usleep(kDeviceLookUs);
    else if (!arrived())
      replay::futex_wait(page.shared().tail_futex, seen, sleep_ms);
    page.shared().server_sleeping.store(0);
    if (arrived()) {
      short_pause_ = replay::now_ns() - idle_since < kYieldNs;
      return true;
    }
    state_.apply_floor();
    if (page.worker().backpressure.load() != 0) relieve_pressure(idle_since);
  }
}

// The worker waits for room and everything it wrote is done: commit here, and if the peers' floor does not
// follow, cut the log all the same. Training goes on; until the next complete commit a fault cannot be
// survived.
void RankExecution::relieve_pressure(uint64_t idle_since_ns) {
  if (roll_.active()) throw RollForwardRefused("the log is full");
  const uint64_t newest = page().server().commit_count.load();
  const bool behind = newest == 0 || last_commit_offset_ != at_.offset;
  if (behind || commit_pending_) make_commit(at_);
  if (state_.snapshot_now()) {
    state_.apply_floor();
    return;
  }
  // Where that happens again and again there is too little memory for what the program does between commits.
  const uint64_t patience = kPressurePatienceNs >> std::min<uint32_t>(cuts_, 6);
  if (replay::now_ns() - idle_since_ns < patience && options_.policy.protect) return;
  if (!options_.policy.protect || cuts_++ != 0) return state_.cut_log();  // said already
  std::fprintf(
      stderr,
      "understudy: the log of rank %u is full (%llu MiB, and %llu MiB for templates of calls) and its "
      "peers hold no matching commit; it is cut here. "
      "Training goes on, but a fault before the next commit cannot be survived. It is said only once\n",
      page().fixed().rank, static_cast<unsigned long long>(log_.segment_bytes() * log_.segment_count() >> 20),
      static_cast<unsigned long long>(log_.dictionary_bytes() >> 20));
  state_.cut_log();
}

// Whether to stand still here, as it was asked to.
bool RankExecution::stands_here() {
  if (requests_.to_park_anywhere()) return true;
  const bool no_way_back = state_.table().sealed() && !commit_pending_;
  return !communicators_.in_group() && !no_way_back && !(in_step_ && state_.steps_are_final());
}

// To stand still between two records. A commit that waits for the next one is made now if the state is
// complete and there would be no other to go back to.
void RankExecution::complete_commit() {
  try {
    const bool only = state_.steps_are_final() || state_.table().sealed();
    if (only && commit_pending_ && communicators_.settled(state_.table())) make_commit(at_);
  } catch (const RollForwardRefused&) {  // whoever asked to park sees that there is no commit
  }
}

// Counts the record, fires drills, does its frees, and completes a commit that waited for them.
void RankExecution::begin_record(const Record& r, const uint64_t* frees) {
  const auto page = log_.server_page();
  at_.call++;
  page.server().call.store(at_.call, std::memory_order_relaxed);
  if (__builtin_expect(
          !drills_.empty() || page.daemon().drill_count.load(std::memory_order_relaxed) != drills_seen_, 0))
    fire_drills(r);
  if (__builtin_expect(state_.table().sealed(), 0)) page.server().sealed.store(1, std::memory_order_relaxed);
  if (!at_.frees_done) {
    const bool failed = page.server().error_kind.load(std::memory_order_relaxed) != 0;
    for (uint16_t i = 0; i < r.frees; i++) {
      const uint64_t handle = frees[i];
      if (failed && state_.table().find(handle) == nullptr) continue;  // its maker was skipped
      state_.table().free(handle);
      if (__builtin_expect(roll_.active(), 0)) roll_.forget(handle);
    }
    at_.frees_done = true;
  }
  // A commit takes effect at the first record that does something: what the program frees right after its
  // optimizer step (zero_grad) is then no longer part of it.
  const auto kind = static_cast<Kind>(r.kind);
  const bool optimizer = kind == Kind::kPhase && begins_optimizer(r);
  if (optimizer || (commit_pending_ && !replay::is_account(kind) && may_commit())) {
    Position here = at_;
    here.call--;  // this record has not run
    make_commit(here, optimizer);
  }
}

}  // namespace understudy::server
