// Where minibatches, commits and validations begin and end in the log.
#include <ATen/Context.h>

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "proxy_server/csrc/executor/executor.h"
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
bool Executor::begins_optimizer(Session& s, const Record& r) const {
  return static_cast<replay::Phase>(r.aux) == replay::Phase::kOptimizer && s.state->steps_are_final() &&
         s.log.page().error_kind.load(std::memory_order_relaxed) == 0 &&
         !s.state->committed_for_optimizer(r.index);
}

// A GPU is behind its executor by what is queued on it, collectives included: that is no wait for peers. What
// the current stream waits for, all that the script does next there waits for, too.
void Executor::let_device_catch_up(const Session& s) {
  if (!s.driver.streams().several()) return;
  const c10::Event here = s.driver.streams().mark_here();
  const uint64_t until = replay::now_ns() + kLongestBehindNs;
  while (!here.query() && replay::now_ns() < until && !requests_.to_park()) usleep(kMinibatchLookUs);
}

// Whether nothing is in flight any more within so long.
bool Executor::settles(Session& s, uint64_t patience_ns) {
  if (patience_ns != 0) let_device_catch_up(s);
  for (const uint64_t until = replay::now_ns() + patience_ns;; usleep(kMinibatchLookUs)) {
    if (s.communicators.settled(s.state->table())) return true;
    if (replay::now_ns() > until || requests_.to_park()) return false;
  }
}

// A commit has nothing in flight, and waits for nobody, nor does a stream that it waits for: a peer may begin
// its part only behind what comes next. It is made at the first record at which that is so; if none comes for
// long, by waiting after all. Not in the midst of the next step, which brings a commit of its own; and not
// where there is no other to go back to. A replay from amid a group would start its calls one by one.
bool Executor::may_commit(Session& s) {
  const bool only = s.state->steps_are_final();
  if (s.communicators.in_group()) return false;
  if (!s.communicators.under_way() || only || settles(s, 0)) return true;
  if (s.in_step) return false;
  if (s.pending_since == 0 &&
      settles(s, s.state->snapshot_is_due(s.at.steps) ? kSnapshotPatienceNs : kPatienceNs))
    return true;
  s.log.page().phase.store(static_cast<uint32_t>(replay::Phase::kForwardBackward), std::memory_order_relaxed);
  if (s.pending_since == 0) s.pending_since = s.at.offset;
  return s.at.offset - s.pending_since > kLongestPending;
}

void Executor::make_commit(Session& s, const Position& position, bool optimizer) {
  if (s.roll.active()) {
    if (!s.commit_pending) throw RollForwardRefused("a step begins within the step");
    s.roll.finish(*s.state, s.step_digest.value());
    rolling_.store(false);
  }
  if (const auto replicated = requests_.take_replicated()) s.state->set_replicated(*replicated);
  // Everything is about to change where a step begins, unless one has just ended: no place for a snapshot.
  // Nor is one that had to wait, as the next minibatch has begun; unless there would never be another.
  const bool late = s.pending_since != 0 && position.offset - s.pending_since <= kLongestPending;
  const bool for_snapshot = (!optimizer || s.commit_pending) && !late;
  const bool begins = s.commit_pending;  // a minibatch, rather than lies within one
  const bool final = s.state->steps_are_final();
  s.state->commit(position, optimizer, for_snapshot, s.step_digest.value());
  s.passed.all_passed(position.index);
  if (s.validation.has_first() && s.state->steps_are_final() != final)
    s.validation.leave_out();  // its second pass would end at another record
  s.step_digest.reset();
  s.commit_pending = false;
  s.pending_since = 0;
  s.last_commit_offset = position.offset;
  if (begins && !s.options.policy.protect && s.validation.active() && !s.validation.has_first() &&
      !(has_room(s.options.log_directory, s.state->table().live_bytes()) && s.state->snapshot_here()))
    s.validation.leave_out();
}

void Executor::end_of_step(Session& s) {
  auto& page = s.log.page();
  s.at.steps++;
  if (s.calls_per_step.size() < 4096) {
    s.calls_per_step.push_back(s.at.call);
    s.bytes_per_step.push_back(s.at.offset - s.step_offset);
  }
  page.recent_calls[s.at.steps % replay::kRecentSteps].store(s.at.call, std::memory_order_relaxed);
  s.step_offset = s.at.offset;
  s.at.call = 0;
  begin_minibatch(s);
  page.step.store(s.at.steps + 1, std::memory_order_relaxed);
  page.call.store(0, std::memory_order_relaxed);
  if (s.at.steps % 16 == 1) publish_medians(s);
}

// On a GPU kernels may add in any order; a minibatch that is to be the same twice must not.
void Executor::begin_minibatch(Session& s) {
  s.validation.begin(s.at.steps + 1);
  if (s.validation.active() && s.driver.device().is_cuda())
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
}

std::string Executor::name_of_record(Session& s, uint64_t index) {
  replay::LogReader reader(s.log);
  for (uint64_t offset = s.last_commit_offset; offset < s.at.offset;) {
    const auto [r, body] = reader.read(offset, s.at.offset);
    const auto kind = static_cast<Kind>(r.kind);
    if (r.index == index)
      return replay::is_operator(kind) ? s.templates.find(r.aux).name : replay::name_of(kind);
    offset += r.bytes;
  }
  return "a call before the commit";
}

// Where a minibatch that is validated ends: with its optimizer step, unless no way leads out of that.
bool Executor::ends_validation(const Session& s, const Record& r) const {
  const auto kind = static_cast<Kind>(r.kind);
  if (s.state->steps_are_final())
    return kind == Kind::kPhase && static_cast<replay::Phase>(r.aux) == replay::Phase::kOptimizer;
  return kind == Kind::kCommit && static_cast<replay::CommitKind>(r.aux) == replay::CommitKind::kStep;
}

// The end of a minibatch that is being validated; throws ValidationPause after the first pass.
void Executor::validate(Session& s) {
  // Peers may come only behind this, so that what is in flight is not waited for at any price.
  if (!settles(s, kValidationPatienceNs)) return s.validation.leave_out();
  if (s.state->table().sealed() && !s.validation.has_first()) return s.validation.leave_out();
  if (!s.options.policy.protect) s.state->finish_snapshot();
  if (s.validation.at_end(*s.state))
    throw ValidationPause("validation of step " + std::to_string(s.at.steps + 1));
  if (s.driver.device().is_cuda()) s.state->settings().apply(replay::Setting::kDeterministic);
  std::string message = s.validation.difference();
  if (const auto record = s.validation.differing_record(); record && !message.empty())
    message = "replay differs: " + message + " (" + name_of_record(s, *record) + ")";
  else if (!message.empty())
    message = "replay differs: " + message;
  if (!message.empty())
    std::fprintf(stderr, "understudy: rank %u, step %llu: %s\n", s.log.page().rank,
                 static_cast<unsigned long long>(s.at.steps + 1), message.c_str());
  s.validation.publish(message);
}

void Executor::publish_medians(Session& s) {
  s.log.page().median_calls_per_step.store(median(s.calls_per_step), std::memory_order_relaxed);
  s.log.page().median_bytes_per_step.store(median(s.bytes_per_step), std::memory_order_relaxed);
}

}  // namespace understudy::server
