#include "proxy_server/csrc/executor/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "proxy_server/csrc/driver/kept_blocks.h"
#include "replay/csrc/log/futex.h"

namespace understudy::server {

using replay::LogError;

namespace {

constexpr uint64_t kHoldPatienceNs = 100000000;  // for the record that runs to end
constexpr std::chrono::milliseconds kHoldLook{1};

}  // namespace

Executor::Executor(BackendFactory factory)
    : factory_(std::move(factory)), thread_([this] { thread_main(); }) {}

Executor::~Executor() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    requests_.park();
    if (execution_) execution_->abort();
  }
  changed_.notify_all();
  thread_.join();
}

RankExecution& Executor::need_execution() const {
  if (!execution_) throw LogError("this device server has no session");
  return *execution_;
}

RankExecution& Executor::need_parked() const {
  RankExecution& execution = need_execution();
  std::lock_guard<std::mutex> lock(mutex_);
  // A rank that has ended stands still too: a peer that did not may still need its state.
  if (state_ != State::kParked && state_ != State::kEnded)
    throw LogError("the device server must be parked for this");
  return execution;
}

State Executor::current() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

uint64_t Executor::cursor_index() const {
  std::lock_guard<std::mutex> lock(mutex_);  // a session may end meanwhile
  return execution_ ? execution_->page().server().cursor_index.load() : 0;
}

bool Executor::rolling() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return execution_ && execution_->rolling();
}

uint64_t Executor::commit() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return execution_ ? execution_->page().server().commit_count.load() : 0;
}

void Executor::attach(const AttachOptions& options) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::kIdle) throw LogError("the device server already has a session");
  }
  auto execution = std::make_unique<RankExecution>(options, factory_, requests_);
  std::lock_guard<std::mutex> lock(mutex_);
  execution_ = std::move(execution);
  execution_->page().server().device_lost.store(0);
  life_.hold(execution_->page().shared().server_life);
  state_ = State::kParked;
  held_ = false;
  requests_.take_back();
  fault_.reset();
}

void Executor::resume() {
  life_.hold(need_parked().page().shared().server_life);  // one that was to come after us may have had it
  std::lock_guard<std::mutex> lock(mutex_);
  requests_.take_back();
  fault_.reset();
  state_ = State::kRunning;
  changed_.notify_all();
}

void Executor::park() {
  RankExecution& execution = need_execution();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::kRunning) {
    requests_.park();
    execution.wake();
    execution.abort();
    changed_.wait(lock, [this] { return state_ != State::kRunning; });
  }
}

void Executor::hold() {
  RankExecution& execution = need_execution();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ != State::kRunning) return;
  requests_.hold();
  execution.wake();
  // One that waits for peers may wait for such as stand already.
  const auto& waits = execution.page().server().in_collective;
  for (const uint64_t until = replay::now_ns() + kHoldPatienceNs; waits.load() == 0;)
    if (changed_.wait_for(lock, kHoldLook, [this] { return state_ != State::kRunning; }) ||
        replay::now_ns() >= until)
      return;
}

void Executor::let_go() {
  need_execution();
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kRunning) requests_.take_back();
  if (state_ != State::kParked || !held_) return;
  requests_.take_back();
  state_ = State::kRunning;
  changed_.notify_all();
}

uint64_t Executor::rewind(uint64_t commit) { return need_parked().rewind(commit); }

uint64_t Executor::restore(uint64_t commit) { return need_parked().restore(commit); }

uint64_t Executor::restore_snapshot(uint64_t commit) { return need_parked().restore_snapshot(commit); }

uint32_t Executor::rebuild(uint32_t generation) { return need_parked().rebuild(generation); }

void Executor::begin_rebuild(uint32_t generation) { need_parked().begin_rebuild(generation); }

void Executor::roll_forward(const RollForward::Contents& contents) { need_parked().roll_forward(contents); }

DeviceState& Executor::parked_state() {
  RankExecution& execution = need_parked();
  if (execution.rolling()) throw LogError("the device server is between two commits");
  return execution.state();
}

void Executor::detach() {
  if (!execution_) return;
  park();
  std::unique_ptr<RankExecution> gone;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gone = std::move(execution_);
    life_.let_go();
    state_ = State::kIdle;
    fault_.reset();
  }
  const Driver driver = gone->close();
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
    std::optional<Fault> fault;
    const State next = run(*execution_, fault);
    execution_->end_running();
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = next == State::kParked && !fault;
    if (held_ && !requests_.to_park()) continue;  // it was let go meanwhile
    state_ = next;
    if (fault) fault_ = std::move(fault);
    changed_.notify_all();
  }
}

// Runs records for as long as nothing fails. Returns what follows, and names the fault, if others have to
// know.
State Executor::run(RankExecution& execution, std::optional<Fault>& fault) {
  const auto name = [&](FaultKind kind, const std::exception& e) {
    fault = Fault{kind, e.what(), execution.index()};
  };
  try {
    return execution.run_records() ? State::kEnded : State::kParked;
  } catch (const CollectiveError& e) {
    execution.abort();  // peers that wait for this rank must learn of it
    if (!requests_.goes_back_anyway()) name(FaultKind::kCollective, e);
  } catch (const ValidationPause& e) {
    name(FaultKind::kValidation, e);
  } catch (const RollForwardRefused& e) {
    name(FaultKind::kRestart, e);
  } catch (const replay::ContentLost& e) {
    name(FaultKind::kRestart, e);
  } catch (const DriverError& e) {
    execution.abort();
    if (!requests_.goes_back_anyway()) name(e.suspect ? FaultKind::kSuspect : FaultKind::kCall, e);
  } catch (const std::exception& e) {
    execution.end_session(e);
    return State::kEnded;
  }
  return State::kParked;
}

}  // namespace understudy::server
