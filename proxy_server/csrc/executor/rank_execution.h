// What a device server executes of one rank: its log, its state on the device, and where in the log that
// stands.
//
// One thread runs the records. Whatever else changes the state is called while none run; the few functions
// for which that does not hold say so.
#pragma once
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "proxy_server/csrc/calls/template_cache.h"
#include "proxy_server/csrc/collectives/collectives.h"
#include "proxy_server/csrc/executor/passed_records.h"
#include "proxy_server/csrc/executor/requests.h"
#include "proxy_server/csrc/executor/roll_forward.h"
#include "proxy_server/csrc/executor/step_digest.h"
#include "proxy_server/csrc/executor/validation.h"
#include "proxy_server/csrc/state/device_state.h"
#include "replay/csrc/log/log_reader.h"

namespace understudy::server {

class WrittenViews;

struct AttachOptions {
  std::string log_directory;
  std::string device;
  int threads = 1;
  Policy policy;
  uint32_t generation = 0;
  uint64_t block_until_commit = 0;  // before there is this one the device is waited for after each operator
};

class RankExecution {
 public:
  RankExecution(const AttachOptions& options, const BackendFactory& factory, Requests& requests);

  // Runs records until the log ends, or until it was asked to park: then false. Throws CollectiveError,
  // DriverError, ValidationPause, RollForwardRefused or ContentLost, each of which others can mend; for
  // anything else see end_session().
  bool run_records();
  // Behind run_records(), however that ended.
  void end_running();
  // Tells the worker that it is over. Ends the process if the driver of the device is lost.
  void end_session(const std::exception& error);

  // While no records run.
  uint64_t rewind(uint64_t commit);            // returns bytes brought back
  uint64_t restore(uint64_t commit);           // fresh; returns bytes taken from shadows
  uint64_t restore_snapshot(uint64_t commit);  // returns bytes taken from the snapshot
  void roll_forward(const RollForward::Contents& contents);
  uint32_t rebuild(uint32_t generation) { return communicators_.rebuild(generation); }
  void begin_rebuild(uint32_t generation) { communicators_.begin_rebuild(generation); }
  DeviceState& state() { return state_; }
  uint64_t index() const { return at_.index; }  // of the record that is next, or ran when it was thrown
  // Before it is destroyed. Returns the driver, which outlives it.
  Driver close();

  // From any thread.
  bool rolling() const { return rolling_.load(); }  // the state is of no commit
  replay::ServerPage page() const { return log_.server_page(); }
  void wake();  // so that it sees what is asked of it
  void abort() { communicators_.abort(); }

 private:
  // rank_execution.cpp: from one record to the next
  uint64_t stand_at(const std::pair<Position, uint64_t>& result);
  bool wait_for_records(uint64_t& tail);
  void relieve_pressure(uint64_t idle_since_ns);
  bool stands_here();
  void complete_commit();
  void begin_record(const replay::Record& r, const uint64_t* frees);

  // run_record.cpp: what one does
  void run_record(const replay::Record& r, uint64_t* body);
  bool runs_in_roll(const replay::Record& r, const uint64_t* reply_words, Words words);
  void reply(uint64_t* reply_words, const void* data, uint64_t bytes, replay::ErrorKind error,
             bool comparable = true);
  void program_error(const replay::Record& r, replay::ErrorKind kind, const std::string& message);
  std::string call_name(const replay::Record& r);
  bool pass_mark(uint64_t mark);
  void ask_device(const replay::Record& r);
  // So that an error that the device has names the record that it is of.
  bool launches_block() {
    return options_.block_until_commit > state_.table().epoch() || state_.settings().launches_block();
  }

  // run_operator.cpp
  void run_operator(const replay::Record& r, Words words);
  void run_operator_sync(const replay::Record& r, uint64_t* reply_words, Words words);
  void run_kernel(const Template& t, WrittenViews& written, bool told);
  void bind(uint64_t handle, at::Tensor result, const OutputSpec& spec, const Template& t);

  // minibatches.cpp: where minibatches, commits and validations begin and end
  bool begins_optimizer(const replay::Record& r) const;
  void let_device_catch_up() const;
  bool settles(uint64_t patience_ns);
  bool may_commit();
  void make_commit(const Position& position, bool optimizer = false);
  void begin_minibatch();
  void end_of_step();
  void publish_medians();
  bool ends_validation(const replay::Record& r) const;
  void validate();
  std::string name_of_record(uint64_t index);

  // drills.cpp
  void load_drills();
  void fire_drills(const replay::Record& r);
  void fire_drill(const replay::Record& r, replay::Drill& drill);

  // fatal_errors.cpp
  [[noreturn]] void end_with_the_driver(const std::exception& error) const;
  std::string when_it_happened(const std::string& message) const;

  Requests& requests_;
  replay::LogMap log_;
  Driver driver_;
  Communicators communicators_;
  DeviceState state_;
  const AttachOptions options_;
  Validation validation_;
  uint32_t cuts_ = 0;  // of a log that was full
  RollForward roll_;
  std::atomic<bool> rolling_{false};  // roll_ is active, for other threads
  StepDigest step_digest_;
  Position at_;
  PassedRecords passed_;
  bool commit_pending_ = false;
  bool in_step_ = false;        // of an optimizer
  uint64_t pending_since_ = 0;  // offset of the first record at which it had to wait; 0: none
  TemplateCache templates_{log_, driver_};
  torch::jit::Stack stack_;  // of the running operator
  std::vector<uint64_t> calls_per_step_, bytes_per_step_;
  uint64_t step_offset_ = 0, last_commit_offset_ = 0;
  uint64_t checked_index_ = 0;  // the device had done, without an error, all records before this one
  std::vector<std::pair<uint64_t, uint64_t>> drills_;  // (step, call) still to come
  uint32_t drills_seen_ = 0;
  bool sticky_error_ = false;  // by a drill: every call fails
  uint64_t slow_step_ = 0;     // by a drill: the minibatch whose records take longer
  bool spins_ = false;         // wait for records without sleeping first
  bool yields_ = false;      // cores are scarce: leave them to the worker (a GPU would stand idle meanwhile)
  bool short_pause_ = true;  // the worker's last pause was one worth waiting for
};

}  // namespace understudy::server
