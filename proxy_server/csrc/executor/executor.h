// The executor: one thread that reads records and runs them; everything else only steers it.
//
//   idle ──attach──▶ parked ──resume──▶ running ──kEnd──▶ ended
//                      ▲                   │ park() or a failed collective
//                      └───────────────────┘
//
// rewind, restore and the like change the state only while parked; they run on the caller's thread, and the
// executor's thread sees the change because parking and resuming pass through `mutex_`.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "proxy_server/csrc/calls/template_cache.h"
#include "proxy_server/csrc/collectives/collectives.h"
#include "proxy_server/csrc/executor/passed_records.h"
#include "proxy_server/csrc/executor/requests.h"
#include "proxy_server/csrc/executor/roll_forward.h"
#include "proxy_server/csrc/executor/step_digest.h"
#include "proxy_server/csrc/executor/validation.h"
#include "proxy_server/csrc/state/device_state.h"
#include "replay/csrc/life/life_hold.h"
#include "replay/csrc/log/log_reader.h"

namespace understudy::server {

class WrittenViews;

enum class State { kIdle, kParked, kRunning, kEnded };

enum class FaultKind { kCollective, kCall, kSuspect, kValidation, kRestart };

struct Fault {
  FaultKind kind = FaultKind::kCollective;
  std::string message;
  uint64_t record_index = 0;
};

struct AttachOptions {
  std::string log_directory;
  std::string device;
  int threads = 1;
  Policy policy;
  uint32_t generation = 0;
  uint64_t from_commit = 0;
  uint64_t block_until_commit = 0;  // before there is this one the device is waited for after each operator
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
  bool rolling() const { return rolling_.load(); }  // the state is of no commit
  // Takes effect at the next commit.
  void set_replicated(std::vector<uint64_t> handles) { requests_.set_replicated(std::move(handles)); }

  State current() const;
  uint64_t cursor_index() const;
  uint64_t commit() const;
  // Waits for a fault of this executor's own (a failed collective or call); nothing after `milliseconds`.
  std::optional<Fault> wait_for_fault(long milliseconds);

 private:
  struct Session {
    explicit Session(const AttachOptions& options, const BackendFactory& factory);
    // So that an error that the device has names the record that it is of.
    bool launches_block() const {
      return options.block_until_commit > state->table().epoch() || state->settings().launches_block();
    }
    replay::LogMap log;
    Driver driver;
    Communicators communicators;
    std::unique_ptr<DeviceState> state;
    AttachOptions options;
    Validation validation;
    uint32_t cuts = 0;  // of a log that was full
    RollForward roll;
    StepDigest step_digest;
    Position at;
    PassedRecords passed;
    bool commit_pending = false;
    bool in_step = false;        // of an optimizer
    uint64_t pending_since = 0;  // offset of the first record at which it had to wait; 0: none
    TemplateCache templates{log, driver};
    torch::jit::Stack stack;  // of the running operator
    std::vector<uint64_t> calls_per_step, bytes_per_step;
    uint64_t step_offset = 0, last_commit_offset = 0;
    uint64_t checked_index = 0;  // the device had done, without an error, all records before this one
    std::vector<std::pair<uint64_t, uint64_t>> drills;  // (step, call) still to come
    uint32_t drills_seen = 0;
    bool sticky_error = false;  // by a drill: every call fails
    uint64_t slow_step = 0;     // by a drill: the minibatch whose records take longer
    bool spins = false;         // wait for records without sleeping first
    bool yields = false;      // cores are scarce: leave them to the worker (a GPU would stand idle meanwhile)
    bool short_pause = true;  // the worker's last pause was one worth waiting for
  };

  Session& need_session() const;
  Session& need_parked() const;
  uint64_t stand_at(Session& s, const std::pair<Position, uint64_t>& result);
  void thread_main();
  State run_records(Session& s);
  static void wake(Session& s);
  bool stands_here(const Session& s) const;
  State parked_at(Session& s);
  bool wait_for_records(Session& s, uint64_t& tail);
  void run_record(Session& s, const replay::Record& r, uint64_t* body);
  void begin_record(Session& s, const replay::Record& r, const uint64_t* frees);
  void make_commit(Session& s, const Position& position, bool optimizer = false);
  void let_device_catch_up(const Session& s);
  bool settles(Session& s, uint64_t patience_ns);
  bool may_commit(Session& s);
  bool begins_optimizer(Session& s, const replay::Record& r) const;
  bool runs_in_roll(Session& s, const replay::Record& r, const uint64_t* reply_words, Words words);
  void relieve_pressure(Session& s, uint64_t idle_since_ns);
  void load_drills(Session& s);
  void fire_drills(Session& s, const replay::Record& r);
  void fire_drill(Session& s, const replay::Record& r, replay::Drill& drill);
  std::string call_name(Session& s, const replay::Record& r) const;
  void end_of_step(Session& s);
  void begin_minibatch(Session& s);
  bool ends_validation(const Session& s, const replay::Record& r) const;
  void validate(Session& s);
  std::string name_of_record(Session& s, uint64_t index);
  void publish_medians(Session& s);

  void run_operator(Session& s, const replay::Record& r, Words words);
  void run_kernel(Session& s, const Template& t, WrittenViews& written, bool told);
  void run_operator_sync(Session& s, const replay::Record& r, uint64_t* reply_words, Words words);
  void bind(Session& s, uint64_t handle, at::Tensor result, const OutputSpec& spec, const Template& t);
  void reply(Session& s, uint64_t* reply_words, const void* data, uint64_t bytes, replay::ErrorKind error,
             bool comparable = true);
  void ask_device(Session& s, const replay::Record& r) const;
  bool pass_mark(Session& s, uint64_t mark);
  [[noreturn]] void end_with_the_driver(const Session& s, const std::exception& error) const;
  std::string when_it_happened(const Session& s, const std::string& message) const;
  void program_error(Session& s, const replay::Record& r, replay::ErrorKind kind, const std::string& message);

  BackendFactory factory_;
  std::unique_ptr<Session> session_;
  replay::LifeHold life_;  // of the session's log; goes before it does
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  bool stop_ = false;
  bool held_ = false;  // parked because it was asked to, and for no fault
  Requests requests_;
  std::atomic<bool> rolling_{false};
  std::optional<Fault> fault_;
  std::thread thread_;
};

}  // namespace understudy::server
