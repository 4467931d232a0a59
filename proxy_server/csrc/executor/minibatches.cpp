// Where minibatches, commits and validations begin and end in the log.
#include <ATen/Context.h>

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "proxy_server/csrc/executor/rank_execution.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/names.h"

namespace understudy::server {

using replay::Kind;
using replay::Record;

namespace {

constexpr uint64_t kLongestPending = 8 << 20;  // bytes of log
// How long a commit, one that a snapshot is due at, and a validation wait for peers that are about to finish.
constexpr uint64_t kPatienceNs = 500'000, kSnapshotPatienceNs = 100'000'000;
constexpr uint64_t kValidationPatienceNs = 500'000'000;  // less than a server that sleeps is given
constexpr uint64_t kLongestBehindNs = 1'000'000'000;     // that a GPU may be, where a script has streams
constexpr useconds_t kMinibatchLookUs = 20;

// As proxyd looks before it orders one (recovery/upkeep/snapshots.py): a part of the file system is for the
// logs.
bool has_room(const std::string& directory, uint64_t bytes) {
  struct statvfs all{};
  if (statvfs(directory.c_str(), &all) != 0) return false;
  const uint64_t spare = std::min<uint64_t>(1 << 30, all.f_blocks * all.f_frsize / 8);
  return all.f_bavail * all.f_frsize >= bytes + spare;
}

uint64_t median(std::vector<uint64_t> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

// Inside a step without pre-images there is no way back, so there is a commit right before it: a rank that
// dies inside can be rolled forward from there.
bool RankExecution::begins_optimizer(const Record& r) const {
  return static_cast<replay::Phase>(r.aux) == replay::Phase::kOptimizer && state_.steps_are_final() &&
         page().server().error_kind.load(std::memory_order_relaxed) == 0 &&
         !state_.committed_for_optimizer(r.index);
}

// A GPU is behind its executor by what is queued on it, collectives included: that is no wait for peers. What
// the current stream waits for, all that the script does next there waits for, too.
void RankExecution::let_device_catch_up() const {
  if (!driver_.streams().several()) return;
  const c10::Event here = driver_.streams().mark_here();
  const uint64_t until = replay::now_ns() + kLongestBehindNs;
  while (!here.query() && replay::now_ns() < until && !requests_.to_park()) usleep(kMinibatchLookUs);
}

// Whether nothing is in flight any more within so long.
bool RankExecution::settles(uint64_t patience_ns) {
  if (patience_ns != 0) let_device_catch_up();
  for (const uint64_t until = replay::now_ns() + patience_ns;; usleep(kMinibatchLookUs)) {
    if (communicators_.settled(state_.table())) return true;
    if (replay::now_ns() > until || requests_.to_park()) return false;
  }
}

// A commit has nothing in flight, and waits for nobody, nor does a stream that it waits for: a peer may begin
// its part only behind what comes next. It is made at the first record at which that is so; if none comes for
// long, by waiting after all. Not in the midst of the next step, which brings a commit of its own; and not
// where there is no other to go back to. A replay from amid a group would start its calls one by one.
bool RankExecution::may_commit() {
  const bool only = state_.steps_are_final();
  if (communicators_.in_group()) return false;
  if (!communicators_.under_way() || only || settles(0)) return true;
  if (in_step_) return false;
  if (pending_since_ == 0 && settles(state_.snapshot_is_due(at_.steps) ? kSnapshotPatienceNs : kPatienceNs))
    return true;
  page().server().phase.store(static_cast<uint32_t>(replay::Phase::kForwardBackward),
                              std::memory_order_relaxed);
  if (pending_since_ == 0) pending_since_ = at_.offset;
  return at_.offset - pending_since_ > kLongestPending;
}

void RankExecution::make_commit(const Position& position, bool optimizer) {
  if (roll_.active()) {
    if (!commit_pending_) throw RollForwardRefused("a step begins within the step");
    roll_.finish(state_, step_digest_.value());
    rolling_.store(false);
  }
  if (const auto replicated = requests_.take_replicated()) state_.set_replicated(*replicated);
  // Everything is about to change where a step begins, unless one has just ended: no place for a snapshot.
  // Nor is one that had to wait, as the next minibatch has begun; unless there would never be another.
  const bool late = pending_since_ != 0 && position.offset - pending_since_ <= kLongestPending;
  const bool for_snapshot = (!optimizer || commit_pending_) && !late;
  const bool begins = commit_pending_;  // a minibatch, rather than lies within one
  const bool final = state_.steps_are_final();
  state_.commit(position, optimizer, for_snapshot, step_digest_.value());
  passed_.all_passed(position.index);
  if (validation_.has_first() && state_.steps_are_final() != final)
    validation_.leave_out();  // its second pass would end at another record
  step_digest_.reset();
  commit_pending_ = false;
  pending_since_ = 0;
  last_commit_offset_ = position.offset;
  if (begins && !options_.policy.protect && validation_.active() && !validation_.has_first() &&
      !(has_room(options_.log_directory, state_.table().live_bytes()) && state_.snapshot_here()))
    validation_.leave_out();
}

void RankExecution::end_of_step() {
  const auto page = log_.server_page();
  at_.steps++;
  if (calls_per_step_.size() < 4096) {
    calls_per_step_.push_back(at_.call);
    bytes_per_step_.push_back(at_.offset - step_offset_);
  }
  page.server().recent_calls[at_.steps % replay::kRecentSteps].store(at_.call, std::memory_order_relaxed);
  step_offset_ = at_.offset;
  at_.call = 0;
  begin_minibatch();
  page.server().step.store(at_.steps + 1, std::memory_order_relaxed);
  page.server().call.store(0, std::memory_order_relaxed);
  if (at_.steps % 16 == 1) publish_medians();
}

// On a GPU kernels may add in any order; a minibatch that is to be the same twice must not.
void RankExecution::begin_minibatch() {
  validation_.begin(at_.steps + 1);
  if (validation_.active() && driver_.device().is_cuda())
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
}

std::string RankExecution::name_of_record(uint64_t index) {
  replay::LogReader reader(log_);
  for (uint64_t offset = last_commit_offset_; offset < at_.offset;) {
    const auto [r, body] = reader.read(offset, at_.offset);
    const auto kind = static_cast<Kind>(r.kind);
    if (r.index == index)
      return replay::is_operator(kind) ? templates_.find(r.aux).name : replay::name_of(kind);
    offset += r.bytes;
  }
  return "a call before the commit";
}

// Where a minibatch that is validated ends: with its optimizer step, unless no way leads out of that.
bool RankExecution::ends_validation(const Record& r) const {
  const auto kind = static_cast<Kind>(r.kind);
  if (state_.steps_are_final())
    return kind == Kind::kPhase && static_cast<replay::Phase>(r.aux) == replay::Phase::kOptimizer;
  return kind == Kind::kCommit && static_cast<replay::CommitKind>(r.aux) == replay::CommitKind::kStep;
}

// The end of a minibatch that is being validated; throws ValidationPause after the first pass.
void RankExecution::validate() {
  // Peers may come only behind this, so that what is in flight is not waited for at any price.
  if (!settles(kValidationPatienceNs)) return validation_.leave_out();
  if (state_.table().sealed() && !validation_.has_first()) return validation_.leave_out();
  if (!options_.policy.protect) state_.finish_snapshot();
  if (validation_.at_end(state_))
    throw ValidationPause("validation of step " + std::to_string(at_.steps + 1));
  if (driver_.device().is_cuda()) state_.settings().apply(replay::Setting::kDeterministic);
  std::string message = validation_.difference();
  if (const auto record = validation_.differing_record(); record && !message.empty())
    message = "replay differs: " + message + " (" + name_of_record(*record) + ")";
  else if (!message.empty())
    message = "replay differs: " + message;
  if (!message.empty())
    std::fprintf(stderr, "understudy: rank %u, step %llu: %s\n", page().fixed().rank,
                 static_cast<unsigned long long>(at_.steps + 1), message.c_str());
  validation_.publish(message);
}

void RankExecution::publish_medians() {
  page().server().median_calls_per_step.store(median(calls_per_step_), std::memory_order_relaxed);
  page().server().median_bytes_per_step.store(median(bytes_per_step_), std::memory_order_relaxed);
}

}  // namespace understudy::server
