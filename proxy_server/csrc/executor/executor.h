// The executor: one thread that reads records and runs them; everything else only steers it.
//
//   idle ──attach──▶ parked ──resume──▶ running ──kEnd──▶ ended
//                      ▲                   │ park() or a failed collective
//                      └───────────────────┘
//
// What the records are, and what running one does, is RankExecution's. rewind, restore and the like change
// that only while parked; they run on the caller's thread, and the executor's thread sees the change because
// parking and resuming pass through `mutex_`.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "proxy_server/csrc/executor/rank_execution.h"
#include "proxy_server/csrc/executor/requests.h"
#include "replay/csrc/life/life_hold.h"

namespace understudy::server {

enum class State { kIdle, kParked, kRunning, kEnded };

enum class FaultKind { kCollective, kCall, kSuspect, kValidation, kRestart };

struct Fault {
  FaultKind kind = FaultKind::kCollective;
  std::string message;
  uint64_t record_index = 0;
};

class Executor {
 public:
  explicit Executor(BackendFactory factory);
  ~Executor();

  // Control. All throw std::exception; none may run beside another (the caller serialises them).
  void attach(const AttachOptions& options);  // idle -> parked; commit 0 or what restore() follows
  void resume();
  void park();  // -> parked (or ended); aborts what it waits for
  // -> parked at the next record out of which a way leads, if that comes soon, or later; breaks nothing off,
  // and may be taken back.
  void hold();
  void let_go();
  uint64_t rewind(uint64_t commit);            // parked; returns bytes brought back
  uint64_t restore(uint64_t commit);           // parked, fresh; returns bytes taken from shadows
  uint64_t restore_snapshot(uint64_t commit);  // parked; returns bytes taken from the snapshot
  uint32_t rebuild(uint32_t generation);       // parked
  void begin_rebuild(uint32_t generation);     // parked; rebuild() waits for what it begins
  // parked, behind restore(): what runs from here on finishes an optimizer step (see RollForward)
  void roll_forward(const RollForward::Contents& contents);
  void detach();  // -> idle, as new; a device server ends instead
  DeviceState& parked_state();
  bool rolling() const;  // the state is of no commit
  // Takes effect at the next commit.
  void set_replicated(std::vector<uint64_t> handles) { requests_.set_replicated(std::move(handles)); }

  State current() const;
  uint64_t cursor_index() const;
  uint64_t commit() const;
  // Waits for a fault of this executor's own (a failed collective or call); nothing after `milliseconds`.
  std::optional<Fault> wait_for_fault(long milliseconds);

 private:
  RankExecution& need_execution() const;
  RankExecution& need_parked() const;
  void thread_main();
  State run(RankExecution& execution, std::optional<Fault>& fault);

  BackendFactory factory_;
  std::unique_ptr<RankExecution> execution_;
  replay::LifeHold life_;  // of its log; goes before it does
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  bool stop_ = false;
  bool held_ = false;  // parked because it was asked to, and for no fault
  Requests requests_;
  std::optional<Fault> fault_;
  std::thread thread_;
};

}  // namespace understudy::server
