#include "proxy_server/csrc/executor.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "proxy_server/csrc/driver_errors.h"
#include "replay/csrc/futex.h"

namespace understudy::server {

using replay::Kind;
using replay::LogError;
using replay::Record;

namespace {

constexpr uint64_t kAutomaticCommitBytes = 64ull << 20;  // of log without an optimizer step
constexpr uint64_t kPressurePatienceNs = 5000000000ull;  // before a full log is cut without its peers
constexpr long kLongestSleepMs = 64;
constexpr int kFirstLooks = 64, kLooks = 50;  // between looks at the clock
constexpr uint64_t kSpinNs = 200000;
constexpr uint64_t kYieldNs = 4000000;
constexpr uint64_t kCrowdedNs = 20000;  // to offer the core takes longer than this only if somebody takes it
constexpr int kDriverLost = 86;         // exit status of a device server whose driver is lost

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

uint64_t median(std::vector<uint64_t> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

Executor::Session::Session(const AttachOptions& o, const BackendFactory& factory)
    : log(o.log_directory),
      driver(o.device),
      pinned(driver.device(), log.segment_bytes()),
      communicators(driver, log.page(), factory),
      options(o) {
  state = std::make_unique<DeviceState>(driver, log, o.policy, communicators);
  communicators.set_generation(o.generation);
}

Executor::Executor(BackendFactory factory)
    : factory_(std::move(factory)), thread_([this] { thread_main(); }) {}

Executor::~Executor() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    park_requested_.store(true);
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
  state_ = State::kParked;
  park_requested_.store(false);
  fault_.reset();
}

void Executor::resume() {
  need_parked();
  std::lock_guard<std::mutex> lock(mutex_);
  park_requested_.store(false);
  fault_.reset();
  state_ = State::kRunning;
  changed_.notify_all();
}

void Executor::park() {
  Session& s = need_session();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::kRunning) {
    park_requested_.store(true);
    s.communicators.abort();
    auto& page = s.log.page();
    page.tail_futex.fetch_add(1);
    replay::futex_wake(page.tail_futex);
    changed_.wait(lock, [this] { return state_ != State::kRunning; });
  }
}

uint64_t Executor::rewind(uint64_t commit) {
  Session& s = need_parked();
  return stand_at(s, s.state->rewind(commit));
}

uint64_t Executor::restore(uint64_t commit) {
  Session& s = need_parked();
  return stand_at(s, s.state->restore(commit));
}

uint64_t Executor::stand_at(Session& s, const std::pair<Position, uint64_t>& result) {
  s.at = result.first;
  s.commit_pending = false;
  s.log.page().cursor_index.store(s.at.index);
  return result.second;
}

uint32_t Executor::rebuild(uint32_t generation) { return need_parked().communicators.rebuild(generation); }

void Executor::detach() {
  if (!session_) return;
  park();
  std::unique_ptr<Session> gone;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gone = std::move(session_);
    state_ = State::kIdle;
    fault_.reset();
  }
  gone->communicators.close();
  gone->driver.synchronize();  // nothing may still read the log when it goes
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
      if (!park_requested_.load()) fault = Fault{e.what(), s.at.index};
    } catch (const std::exception& e) {
      if (s.driver.device().is_cuda() && !sticky_error(e.what()).empty()) end_with_the_driver(s, e.what());
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
    std::lock_guard<std::mutex> lock(mutex_);
    state_ = next;
    if (fault) fault_ = std::move(fault);
    changed_.notify_all();
  }
}

// The driver's context is lost, and with it all memory of the device: what proxyd does when a device server
// dies is what is needed now.
void Executor::end_with_the_driver(const Session& s, const std::string& error) const {
  std::fprintf(stderr,
               "understudy: the driver of %s is lost for this device server (%s)%s; it ends, and another one "
               "takes over\n",
               s.options.device.c_str(), std::string(sticky_error(error)).c_str(),
               when_it_happened(s, error).c_str());
  _exit(kDriverLost);
}

// Errors of a GPU come to light at whatever record looks next.
std::string Executor::when_it_happened(const Session& s, const std::string& message) const {
  if (!s.driver.device().is_cuda() || message.find("CUDA error: ") == std::string::npos) return {};
  return " [in one of the records " + std::to_string(s.checked_index) + " to " + std::to_string(s.at.index) +
         "; CUDA_LAUNCH_BLOCKING=1 in proxyd's environment finds out in which]";
}

// Waits until tail > s.at.offset. False: asked to park.
bool Executor::wait_for_records(Session& s, uint64_t& tail) {
  auto& page = s.log.page();
  const auto arrived = [&] {
    tail = page.tail.load(std::memory_order_seq_cst);
    return tail != s.at.offset;
  };
  page.cursor.store(s.at.offset, std::memory_order_release);
  for (int i = 0; i < kFirstLooks && s.spins; i++) {
    if (arrived()) return true;
    replay::cpu_relax();
  }
  const uint64_t idle_since = replay::now_ns();
  page.progress_ns.store(idle_since, std::memory_order_relaxed);
  uint64_t now = idle_since;
  for (; s.spins && now < idle_since + kSpinNs; now = replay::now_ns())
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
    if (park_requested_.load(std::memory_order_relaxed)) return false;
    before = now;
    sched_yield();
  }
  for (long sleep_ms = 1;; sleep_ms = std::min(2 * sleep_ms, kLongestSleepMs)) {
    if (park_requested_.load()) return false;
    const uint32_t seen = page.tail_futex.load();
    page.server_sleeping.store(1, std::memory_order_seq_cst);
    if (!arrived()) replay::futex_wait(page.tail_futex, seen, sleep_ms);
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
  const uint64_t newest = s.log.page().commit_count.load();
  const bool behind = newest == 0 || s.last_commit_offset != s.at.offset;
  if (behind || s.commit_pending) make_commit(s, s.at);
  if (replay::now_ns() - idle_since_ns < kPressurePatienceNs && s.options.policy.protect) return;
  if (!s.options.policy.protect || s.log.page().degraded.load() != 0)
    return s.state->cut_log();  // said already
  std::fprintf(stderr,
               "understudy: the log of rank %u is full (%llu MiB) and its peers hold no matching commit; it "
               "is cut here. "
               "Training goes on, but a fault before the next commit cannot be survived\n",
               s.log.page().rank,
               static_cast<unsigned long long>(s.log.segment_bytes() * s.log.segment_count() >> 20));
  s.state->cut_log();
}

State Executor::run_records(Session& s) {
  auto& page = s.log.page();
  if (s.options.threads > 0)
    s.state->set(replay::Setting::kThreads, static_cast<uint64_t>(s.options.threads));
  load_drills(s);
  // Spin only where this rank has two cores to itself (worker and server).
  s.spins = available_cores() >= 2 * static_cast<int>(page.world);
  page.step.store(s.at.steps + 1);
  page.call.store(s.at.call);
  s.step_offset = s.last_commit_offset = s.at.offset;
  uint64_t tail = page.tail.load(std::memory_order_acquire);
  replay::LogReader reader(s.log);
  for (;;) {
    if (s.at.offset == tail && !wait_for_records(s, tail)) return State::kParked;
    if (__builtin_expect(park_requested_.load(std::memory_order_relaxed), 0)) return State::kParked;
    const auto [r, body] = reader.read(s.at.offset, tail);
    if (r.index != s.at.index)
      throw LogError("record " + std::to_string(s.at.index) + " carries number " + std::to_string(r.index));
    const uint64_t bytes = r.bytes;
    const auto kind = static_cast<Kind>(r.kind);
    if (kind != Kind::kPad) {
      begin_record(s, r, body);
      run_record(s, r, body + r.frees);
    }
    s.at.offset += bytes;
    s.at.index++;
    s.at.frees_done = false;
    page.cursor_index.store(s.at.index, std::memory_order_relaxed);
    page.cursor.store(s.at.offset, std::memory_order_relaxed);
    if ((s.at.index & 63) == 0) page.progress_ns.store(replay::now_ns(), std::memory_order_relaxed);
    if (kind == Kind::kEnd) return State::kEnded;
    // Long stretches without an optimizer step (evaluation, generation): the log must not grow for ever.
    if (replay::is_sync(kind) && s.at.offset - s.last_commit_offset > kAutomaticCommitBytes &&
        !s.commit_pending &&
        page.phase.load(std::memory_order_relaxed) == static_cast<uint32_t>(replay::Phase::kForwardBackward))
      make_commit(s, s.at);
  }
}

// Counts the record, fires drills, does its frees, and completes a commit that waited for them.
void Executor::begin_record(Session& s, const Record& r, const uint64_t* frees) {
  auto& page = s.log.page();
  if (!s.at.frees_done) {
    s.at.call++;
    page.call.store(s.at.call, std::memory_order_relaxed);
    if (__builtin_expect(
            !s.drills.empty() || page.drill_count.load(std::memory_order_relaxed) != s.drills_seen, 0))
      fire_drill(s);
    const bool failed = page.error_kind.load(std::memory_order_relaxed) != 0;
    for (uint16_t i = 0; i < r.frees; i++) {
      const uint64_t handle = frees[i];
      if (failed && s.state->table().find(handle) == nullptr) continue;  // its maker was skipped
      s.state->table().free(handle);
    }
    s.at.frees_done = true;
  }
  // A commit takes effect at the first record that does something: what the program frees right after its
  // optimizer step (zero_grad) is then no longer part of it.
  if (s.commit_pending && static_cast<Kind>(r.kind) != Kind::kFree) {
    Position here = s.at;
    here.call--;  // this record has not run
    make_commit(s, here);
  }
}

void Executor::make_commit(Session& s, const Position& position) {
  {
    std::lock_guard<std::mutex> lock(inbox_mutex_);
    if (replicated_inbox_) s.state->set_replicated(*replicated_inbox_);
    replicated_inbox_.reset();
  }
  s.state->commit(position);
  s.commit_pending = false;
  s.last_commit_offset = position.offset;
}

void Executor::set_replicated(std::vector<uint64_t> handles) {
  std::lock_guard<std::mutex> lock(inbox_mutex_);
  replicated_inbox_ = std::move(handles);
}

void Executor::end_of_step(Session& s) {
  auto& page = s.log.page();
  s.at.steps++;
  if (s.calls_per_step.size() < 4096) {
    s.calls_per_step.push_back(s.at.call);
    s.bytes_per_step.push_back(s.at.offset - s.step_offset);
  }
  s.step_offset = s.at.offset;
  s.at.call = 0;
  page.step.store(s.at.steps + 1, std::memory_order_relaxed);
  page.call.store(0, std::memory_order_relaxed);
  if (s.at.steps % 16 == 1) publish_medians(s);
}

void Executor::publish_medians(Session& s) {
  s.log.page().median_calls_per_step.store(median(s.calls_per_step), std::memory_order_relaxed);
  s.log.page().median_bytes_per_step.store(median(s.bytes_per_step), std::memory_order_relaxed);
}

void Executor::load_drills(Session& s) {
  auto& page = s.log.page();
  const uint32_t n = std::min<uint32_t>(page.drill_count.load(std::memory_order_acquire), replay::kMaxDrills);
  s.drills.clear();
  for (uint32_t i = 0; i < n; i++)
    if (page.drills[i].state.load() == static_cast<uint32_t>(replay::DrillState::kArmed))
      s.drills.emplace_back(page.drills[i].step, page.drills[i].call);
  s.drills_seen = page.drill_count.load();
}

void Executor::fire_drill(Session& s) {
  auto& page = s.log.page();
  if (page.drill_count.load(std::memory_order_relaxed) != s.drills_seen) load_drills(s);
  for (uint32_t i = 0; i < std::min<uint32_t>(s.drills_seen, replay::kMaxDrills); i++) {
    replay::Drill& d = page.drills[i];
    if (d.step != s.at.steps + 1 || d.call != s.at.call ||
        d.state.load() != static_cast<uint32_t>(replay::DrillState::kArmed))
      continue;
    d.fired_at_ns = replay::now_ns();
    d.state.store(static_cast<uint32_t>(replay::DrillState::kFired), std::memory_order_release);
    if (d.kind == static_cast<uint32_t>(replay::DrillKind::kKillServer)) kill(getpid(), SIGKILL);
  }
}

}  // namespace understudy::server
