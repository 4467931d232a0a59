#include "proxy_server/csrc/executor/executor.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "proxy_server/csrc/driver/kept_blocks.h"
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
constexpr useconds_t kDeviceLookUs = 50;         // while the script waits for it
constexpr uint64_t kHoldPatienceNs = 100000000;  // for the record that runs to end
constexpr std::chrono::milliseconds kHoldLook{1};
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

Executor::Session::Session(const AttachOptions& o, const BackendFactory& factory)
    : log(o.log_directory),
      driver(o.device),
      communicators(driver, log, factory),
      options(o),
      validation(log.page()),
      passed(log.page(), driver) {
  state = std::make_unique<DeviceState>(driver, log, o.policy, communicators, o.threads);
  communicators.set_generation(o.generation);
  driver.before_waiting([this](const auto& over) { communicators.wait_for_queued(over); });
}

Executor::Executor(BackendFactory factory)
    : factory_(std::move(factory)), thread_([this] { thread_main(); }) {}

Executor::~Executor() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    requests_.park();
    if (session_) session_->communicators.abort();
  }
  changed_.notify_all();
  thread_.join();
}

Executor::Session& Executor::need_session() const {
  if (!session_) throw LogError("this device server has no session");
  return *session_;
}

Executor::Session& Executor::need_parked() const {
  Session& s = need_session();
  std::lock_guard<std::mutex> lock(mutex_);
  // A rank that has ended stands still too: a peer that did not may still need its state.
  if (state_ != State::kParked && state_ != State::kEnded)
    throw LogError("the device server must be parked for this");
  return s;
}

State Executor::current() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

uint64_t Executor::cursor_index() const {
  std::lock_guard<std::mutex> lock(mutex_);  // a session may end meanwhile
  return session_ ? session_->log.page().cursor_index.load() : 0;
}

uint64_t Executor::commit() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return session_ ? session_->log.page().commit_count.load() : 0;
}

void Executor::attach(const AttachOptions& options) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::kIdle) throw LogError("the device server already has a session");
  }
  auto session = std::make_unique<Session>(options, factory_);
  std::lock_guard<std::mutex> lock(mutex_);
  session_ = std::move(session);
  session_->log.page().device_lost.store(0);
  life_.hold(session_->log.page().server_life);
  rolling_.store(false);
  state_ = State::kParked;
  held_ = false;
  requests_.take_back();
  fault_.reset();
}

void Executor::resume() {
  Session& s = need_parked();
  life_.hold(s.log.page().server_life);  // one that was to come after us may have had it
  std::lock_guard<std::mutex> lock(mutex_);
  requests_.take_back();
  fault_.reset();
  state_ = State::kRunning;
  changed_.notify_all();
}

void Executor::park() {
  Session& s = need_session();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::kRunning) {
    requests_.park();
    wake(s);
    s.communicators.abort();
    changed_.wait(lock, [this] { return state_ != State::kRunning; });
  }
}

void Executor::wake(Session& s) {
  auto& page = s.log.page();
  page.tail_futex.fetch_add(1);
  replay::futex_wake(page.tail_futex);
}

void Executor::hold() {
  Session& s = need_session();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ != State::kRunning) return;
  requests_.hold();
  wake(s);
  // One that waits for peers may wait for such as stand already.
  const auto& waits = s.log.page().in_collective;
  for (const uint64_t until = replay::now_ns() + kHoldPatienceNs; waits.load() == 0;)
    if (changed_.wait_for(lock, kHoldLook, [this] { return state_ != State::kRunning; }) ||
        replay::now_ns() >= until)
      return;
}

void Executor::let_go() {
  need_session();
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kRunning) requests_.take_back();
  if (state_ != State::kParked || !held_) return;
  requests_.take_back();
  state_ = State::kRunning;
  changed_.notify_all();
}

uint64_t Executor::rewind(uint64_t commit) {
  Session& s = need_parked();
  return stand_at(s, s.state->rewind(commit));
}

uint64_t Executor::restore(uint64_t commit) {
  Session& s = need_parked();
  return stand_at(s, s.state->restore(commit));
}

uint64_t Executor::restore_snapshot(uint64_t commit) {
  Session& s = need_parked();
  return stand_at(s, s.state->restore_snapshot(commit));
}

void Executor::roll_forward(const RollForward::Contents& contents) {
  Session& s = need_parked();
  s.roll.begin(contents, *s.state);
  rolling_.store(true);
}

DeviceState& Executor::parked_state() {
  Session& s = need_parked();
  if (rolling()) throw LogError("the device server is between two commits");
  return *s.state;
}

uint64_t Executor::stand_at(Session& s, const std::pair<Position, uint64_t>& result) {
  s.at = result.first;
  s.roll = {};
  s.step_digest.reset();
  rolling_.store(false);
  s.commit_pending = s.in_step = false;
  s.pending_since = 0;
  s.passed.stand_at(s.at.index);
  s.log.page().cursor_index.store(s.at.index);
  s.log.page().cursor.store(s.at.offset);
  return result.second;
}

uint32_t Executor::rebuild(uint32_t generation) { return need_parked().communicators.rebuild(generation); }

void Executor::begin_rebuild(uint32_t generation) { need_parked().communicators.begin_rebuild(generation); }

void Executor::detach() {
  if (!session_) return;
  park();
  std::unique_ptr<Session> gone;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gone = std::move(session_);
    life_.let_go();
    state_ = State::kIdle;
    fault_.reset();
  }
  gone->communicators.close();
  gone->driver.synchronize();  // nothing may still read the log when it goes
  const Driver driver = gone->driver;
  driver.streams().forget_marks();  // of works, which hold memory
  gone.reset();
  driver.give_back_freed_memory();  // the next session may be long in coming
}

std::optional<Fault> Executor::wait_for_fault(long milliseconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                    [this] { return fault_.has_value() || stop_; });
  std::optional<Fault> taken;
  taken.swap(fault_);
  return taken;
}

void Executor::thread_main() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const KeptBlocks kept_blocks;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || state_ == State::kRunning; });
      if (stop_) return;
    }
    Session& s = *session_;
    State next = State::kParked;
    std::optional<Fault> fault;
    try {
      s.driver.enter_thread();
      next = run_records(s);
    } catch (const CollectiveError& e) {
      s.communicators.abort();  // peers that wait for this rank must learn of it
      if (!requests_.goes_back_anyway()) fault = Fault{FaultKind::kCollective, e.what(), s.at.index};
    } catch (const ValidationPause& e) {
      fault = Fault{FaultKind::kValidation, e.what(), s.at.index};
    } catch (const RollForwardRefused& e) {
      fault = Fault{FaultKind::kRestart, e.what(), s.at.index};
    } catch (const replay::ContentLost& e) {
      fault = Fault{FaultKind::kRestart, e.what(), s.at.index};
    } catch (const DriverError& e) {
      s.communicators.abort();
      if (!requests_.goes_back_anyway())
        fault = Fault{e.suspect ? FaultKind::kSuspect : FaultKind::kCall, e.what(), s.at.index};
    } catch (const std::exception& e) {
      if (s.driver.lost(e)) end_with_the_driver(s, e);
      // A record we cannot trust: this session ends, no other is harmed.
      auto& page = s.log.page();
      std::snprintf(page.lost_message, sizeof page.lost_message, "the device server refused record %llu: %s",
                    static_cast<unsigned long long>(s.at.index), e.what());
      page.session_state.store(static_cast<uint32_t>(replay::SessionState::kLost), std::memory_order_release);
      for (auto* futex : {&page.reply_futex, &page.freed_futex}) {
        futex->fetch_add(1);
        replay::futex_wake(*futex);
      }
      next = State::kEnded;
    }
    s.state->end_running();
    s.log.page().sealed.store(s.state->table().sealed() ? 1 : 0, std::memory_order_release);
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = next == State::kParked && !fault;
    if (held_ && !requests_.to_park()) continue;  // it was let go meanwhile
    state_ = next;
    if (fault) fault_ = std::move(fault);
    changed_.notify_all();
  }
}

// Waits until tail > s.at.offset. False: asked to park.
bool Executor::wait_for_records(Session& s, uint64_t& tail) {
  auto& page = s.log.page();
  const auto arrived = [&] {
    tail = page.tail.load(std::memory_order_seq_cst);
    return tail != s.at.offset;
  };
  page.cursor.store(s.at.offset, std::memory_order_release);
  while (s.state->advance_snapshot(kSnapshotPortion) && !requests_.to_park(std::memory_order_relaxed))
    if (arrived()) return true;
  for (int i = 0; i < kFirstLooks && s.spins; i++) {
    if (arrived()) return true;
    replay::cpu_relax();
  }
  const uint64_t idle_since = replay::now_ns();
  page.progress_ns.store(idle_since, std::memory_order_relaxed);
  uint64_t now = idle_since;
  for (; s.spins && now < idle_since + kSpinNs; now = replay::now_ns(), s.passed.idle(s.at.index))
    for (int i = 0; i < kLooks; i++) {
      if (arrived()) return true;
      replay::cpu_relax();
    }
  // To be woken takes 50 us and more. A worker whose last pause was short will be back soon: wait for it,
  // but leave the core to whoever else wants it, and then sleep: who waits awake is served late.
  for (uint64_t before = now;
       s.spins && s.short_pause && now < idle_since + kYieldNs && now - before < kCrowdedNs;
       now = replay::now_ns()) {
    if (arrived()) return true;
    if (requests_.to_park(std::memory_order_relaxed)) return false;
    before = now;
    s.passed.idle(s.at.index);
    sched_yield();
  }
  // Where cores are scarce, to wake by oneself takes the worker's from it, and nothing is gained: it wakes us
  // for 32 KiB and for whatever anybody waits for. But it may itself be waiting, for data.
  for (long sleep_ms = s.yields ? kPoliteFirstSleepMs : kFirstSleepMs;;
       sleep_ms = std::min(2 * sleep_ms, kLongestSleepMs)) {
    if (requests_.to_park()) return false;
    const uint32_t seen = page.tail_futex.load();
    s.state->advance_snapshot(kSnapshotPortion);  // its copier may have ended before it could wake us
    page.server_sleeping.store(1, std::memory_order_seq_cst);
    if (s.passed.idle(s.at.index))
      usleep(kDeviceLookUs);
    else if (!arrived())
      replay::futex_wait(page.tail_futex, seen, sleep_ms);
    page.server_sleeping.store(0);
    if (arrived()) {
      s.short_pause = replay::now_ns() - idle_since < kYieldNs;
      return true;
    }
    s.state->apply_floor();
    if (page.backpressure.load() != 0) relieve_pressure(s, idle_since);
  }
}

// The worker waits for room and everything it wrote is done: commit here, and if the peers' floor does not
// follow, cut the log all the same. Training goes on; until the next complete commit a fault cannot be
// survived.
void Executor::relieve_pressure(Session& s, uint64_t idle_since_ns) {
  if (s.roll.active()) throw RollForwardRefused("the log is full");
  const uint64_t newest = s.log.page().commit_count.load();
  const bool behind = newest == 0 || s.last_commit_offset != s.at.offset;
  if (behind || s.commit_pending) make_commit(s, s.at);
  if (s.state->snapshot_now()) {
    s.state->apply_floor();
    return;
  }
  // Where that happens again and again there is too little memory for what the program does between commits.
  const uint64_t patience = kPressurePatienceNs >> std::min<uint32_t>(s.cuts, 6);
  if (replay::now_ns() - idle_since_ns < patience && s.options.policy.protect) return;
  if (!s.options.policy.protect || s.cuts++ != 0) return s.state->cut_log();  // said already
  std::fprintf(
      stderr,
      "understudy: the log of rank %u is full (%llu MiB, and %llu MiB for templates of calls) and its "
      "peers hold no matching commit; it is cut here. "
      "Training goes on, but a fault before the next commit cannot be survived. It is said only once\n",
      s.log.page().rank, static_cast<unsigned long long>(s.log.segment_bytes() * s.log.segment_count() >> 20),
      static_cast<unsigned long long>(s.log.dictionary_bytes() >> 20));
  s.state->cut_log();
}

State Executor::run_records(Session& s) {
  auto& page = s.log.page();
  s.state->begin_running();
  load_drills(s);
  // Spin only where this rank has two cores to itself (worker and server).
  s.spins = available_cores() >= 2 * static_cast<int>(page.world);
  s.yields = !s.spins && s.driver.device().is_cpu();
  if (s.yields) take_no_core_away();
  page.step.store(s.at.steps + 1);
  page.call.store(s.at.call);
  s.step_offset = s.last_commit_offset = s.at.offset;
  begin_minibatch(s);
  const uint64_t much = replay::automatic_commit_bytes(page);
  uint64_t tail = page.tail.load(std::memory_order_acquire);
  replay::LogReader reader(s.log);
  for (;;) {
    if (s.at.offset == tail && !wait_for_records(s, tail)) {
      if (stands_here(s)) return parked_at(s);
      s.passed.idle(s.at.index);  // the script may wait for what it goes on with
      usleep(kStepLookUs);        // the rest of the step is on its way
      tail = page.tail.load(std::memory_order_acquire);
      continue;
    }
    if (__builtin_expect(requests_.to_park(std::memory_order_relaxed), 0) && stands_here(s))
      return parked_at(s);
    const auto [r, body] = reader.read(s.at.offset, tail);
    if (r.index != s.at.index)
      throw LogError("record " + std::to_string(s.at.index) + " carries number " + std::to_string(r.index));
    const uint64_t bytes = r.bytes;
    const auto kind = static_cast<Kind>(r.kind);
    if (__builtin_expect(s.validation.active(), 0) && ends_validation(s, r)) validate(s);
    if (kind != Kind::kPad) {
      begin_record(s, r, body);
      run_record(s, r, body + r.frees);
    }
    s.at.offset += bytes;
    s.at.index++;
    s.at.frees_done = false;
    page.cursor_index.store(s.at.index, std::memory_order_relaxed);
    page.cursor.store(s.at.offset, std::memory_order_relaxed);
    s.passed.given(s.at.index);
    if ((s.at.index & 63) == 0) {
      page.progress_ns.store(replay::now_ns(), std::memory_order_relaxed);
      s.state->advance_snapshot(kSnapshotPortion);
    }
    if (kind == Kind::kEnd) return State::kEnded;
    // Long stretches without an optimizer step (evaluation, generation): the log must not grow for ever.
    // Where the program reads a value, as a rule: there its ranks stand at the same place.
    const uint64_t uncommitted = s.at.offset - s.last_commit_offset;
    if (__builtin_expect(uncommitted > much, 0) && (replay::is_sync(kind) || uncommitted > 2 * much) &&
        !s.commit_pending && s.communicators.settled(s.state->table()) &&
        page.phase.load(std::memory_order_relaxed) == static_cast<uint32_t>(replay::Phase::kForwardBackward))
      make_commit(s, s.at);
  }
}

// Whether to stand still here, as it was asked to.
bool Executor::stands_here(const Session& s) const {
  if (requests_.to_park_anywhere()) return true;
  const bool no_way_back = s.state->table().sealed() && !s.commit_pending;
  return !s.communicators.in_group() && !no_way_back && !(s.in_step && s.state->steps_are_final());
}

// Between two records. A commit that waits for the next one is made now if the state is complete and there
// would be no other to go back to.
State Executor::parked_at(Session& s) {
  try {
    const bool only = s.state->steps_are_final() || s.state->table().sealed();
    if (only && s.commit_pending && s.communicators.settled(s.state->table())) make_commit(s, s.at);
  } catch (const RollForwardRefused&) {  // whoever asked to park sees that there is no commit
  }
  return State::kParked;
}

// Counts the record, fires drills, does its frees, and completes a commit that waited for them.
void Executor::begin_record(Session& s, const Record& r, const uint64_t* frees) {
  auto& page = s.log.page();
  s.at.call++;
  page.call.store(s.at.call, std::memory_order_relaxed);
  if (__builtin_expect(!s.drills.empty() || page.drill_count.load(std::memory_order_relaxed) != s.drills_seen,
                       0))
    fire_drills(s, r);
  if (__builtin_expect(s.state->table().sealed(), 0)) page.sealed.store(1, std::memory_order_relaxed);
  if (!s.at.frees_done) {
    const bool failed = page.error_kind.load(std::memory_order_relaxed) != 0;
    for (uint16_t i = 0; i < r.frees; i++) {
      const uint64_t handle = frees[i];
      if (failed && s.state->table().find(handle) == nullptr) continue;  // its maker was skipped
      s.state->table().free(handle);
      if (__builtin_expect(s.roll.active(), 0)) s.roll.forget(handle);
    }
    s.at.frees_done = true;
  }
  // A commit takes effect at the first record that does something: what the program frees right after its
  // optimizer step (zero_grad) is then no longer part of it.
  const auto kind = static_cast<Kind>(r.kind);
  const bool optimizer = kind == Kind::kPhase && begins_optimizer(s, r);
  if (optimizer || (s.commit_pending && !replay::is_account(kind) && may_commit(s))) {
    Position here = s.at;
    here.call--;  // this record has not run
    make_commit(s, here, optimizer);
  }
}

}  // namespace understudy::server
