// Running one record: the device server's whole repertoire, one arm per kind.
#include <ATen/native/Resize.h>

#include <algorithm>
#include <cstring>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/rank_execution.h"
#include "proxy_server/csrc/state/memory_report.h"
#include "replay/csrc/digest/digest.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/names.h"

namespace understudy::server {

using replay::ErrorKind;
using replay::Kind;
using replay::LogError;
using replay::Record;
using replay::Tag;

namespace {

ErrorKind kind_of(const c10::Error& e) {
  if (dynamic_cast<const c10::IndexError*>(&e) != nullptr) return ErrorKind::kIndex;
  if (dynamic_cast<const c10::ValueError*>(&e) != nullptr) return ErrorKind::kValue;
  if (dynamic_cast<const c10::TypeError*>(&e) != nullptr) return ErrorKind::kType;
  if (dynamic_cast<const c10::NotImplementedError*>(&e) != nullptr) return ErrorKind::kNotImplemented;
  if (dynamic_cast<const c10::LinAlgError*>(&e) != nullptr) return ErrorKind::kLinAlg;
  if (dynamic_cast<const c10::BufferError*>(&e) != nullptr) return ErrorKind::kBuffer;
  if (out_of_memory(e)) return ErrorKind::kOutOfMemory;
  return ErrorKind::kRuntime;
}

uint64_t checked_bytes(uint64_t bytes) {
  if (bytes > (1ull << 48)) throw LogError("a buffer of " + std::to_string(bytes) + " bytes");
  return bytes;
}

}  // namespace

// Publishes the answer of a sync record; in a replay of one already answered, compares instead.
void RankExecution::reply(uint64_t* reply_words, const void* data, uint64_t bytes, ErrorKind error,
                          bool comparable) {
  const auto page = log_.server_page();
  if (driver_.device().is_cuda()) {
    // A collective that park() aborted ends without an error and leaves anything in its buffers.
    if (requests_.goes_back_anyway()) throw CollectiveError("communication was aborted");
    checked_index_ = at_.index + 1;
  }
  const uint64_t sequence = reply_words[0];
  const uint64_t seen = replay::digest(data, bytes);
  if (page.server().reply_sequence.load() >= sequence) {
    if (!comparable) return;
    page.server().replies_compared.fetch_add(1);
    if (reply_words[1] != seen) {
      page.server().replies_different.fetch_add(1);
      std::fprintf(stderr,
                   "understudy: rank %u, record %llu: the replayed value differs from the delivered one\n",
                   page.fixed().rank, static_cast<unsigned long long>(at_.index));
    }
    return;
  }
  if (bytes > log_.reply_bytes() - sizeof(replay::ReplyHeader)) throw LogError("a reply is too large");
  if (!log_.reserve_reply(sizeof(replay::ReplyHeader) + bytes)) {
    const std::string message = "shared memory is full: /dev/shm has no room for a value of " +
                                std::to_string(bytes) + " bytes that the program reads";
    return reply(reply_words, message.data(), message.size(), ErrorKind::kOutOfMemory, comparable);
  }
  auto* header = reinterpret_cast<replay::ReplyHeader*>(log_.reply());
  *header = {bytes, static_cast<uint32_t>(error), 0};
  if (bytes != 0) std::memcpy(header + 1, data, bytes);
  reply_words[1] = seen;
  page.server().cursor.store(at_.offset, std::memory_order_relaxed);
  page.server().reply_sequence.store(sequence, std::memory_order_seq_cst);
  page.shared().reply_futex.fetch_add(1);
  if (page.shared().worker_sleeping.load(std::memory_order_seq_cst) != 0)
    replay::futex_wake(page.shared().reply_futex);
}

std::string RankExecution::call_name(const Record& r) {
  const auto kind = static_cast<Kind>(r.kind);
  if (replay::is_operator(kind))
    if (const Template* known = templates_.find_parsed(r.aux)) return known->name;
  return replay::name_of(kind);
}

void RankExecution::program_error(const Record& r, ErrorKind kind, const std::string& message) {
  const auto page = log_.server_page();
  if (page.server().error_kind.load() != 0) return;
  std::snprintf(page.server().error_operator, sizeof page.server().error_operator, "%s",
                call_name(r).c_str());
  std::snprintf(page.server().error_message, sizeof page.server().error_message, "%s", message.c_str());
  page.server().error_index = r.index;
  page.server().error_kind.store(static_cast<uint32_t>(kind), std::memory_order_release);
}

// While an optimizer step is finished with contents of its end: whether the record is to be run.
bool RankExecution::runs_in_roll(const Record& r, const uint64_t* reply_words, Words words) {
  switch (static_cast<Kind>(r.kind)) {
    case Kind::kOperator:
      return roll_.runs_operator(templates_.find(r.aux), words, state_);
    case Kind::kOperatorSync:
      roll_.check_sync_operator(templates_.find(r.aux), words);
      return true;
    case Kind::kHostToDevice:
      return roll_.runs_upload(r.aux);
    case Kind::kDeviceToHost:
      return roll_.runs_read(r.aux, page().server().reply_sequence.load() >= reply_words[0]);
    case Kind::kResize:
      roll_.check_resize(r.aux);
      return true;
    case Kind::kCommit:
      if (static_cast<replay::CommitKind>(r.aux) == replay::CommitKind::kStep) return true;
      throw RollForwardRefused("a commit lies within the step");
    case Kind::kCollective:
    case Kind::kCommunicatorCreate:
    case Kind::kCommunicatorDestroy:
      throw RollForwardRefused("a collective lies within the step");
    default:
      return true;
  }
}

// Whether it still works, as a library's error does not say. Throws what is not the program's.
void RankExecution::ask_device(const Record& r) {
  try {
    driver_.synchronize();
  } catch (const c10::Error& e) {
    if (driver_.lost(e)) throw;
    throw DriverError(std::string(e.what_without_backtrace()) + " [device call " + call_name(r) +
                      ", record " + std::to_string(r.index) + "]");
  }
}

// Waits for that alone; whether it is known.
bool RankExecution::pass_mark(uint64_t mark) {
  const ScriptStreams::Mark* const known = driver_.streams().find(mark);
  if (known == nullptr) return driver_.streams().is_past(mark);
  if (!known->event) return false;
  communicators_.wait_for_queued([known] { return known->event->query(); });
  known->event->synchronize();
  return true;
}

void RankExecution::run_record(const Record& r, uint64_t* body) {
  const auto kind = static_cast<Kind>(r.kind);
  const auto page = log_.server_page();
  const uint64_t count = (r.bytes - sizeof(Record)) / 8 - r.frees;
  const bool sync = replay::is_sync(kind);
  if (sync && count < 2) throw LogError("a sync record is too short");
  Words words(body + (sync ? 2 : 0), count - (sync ? 2 : 0));
  if (kind == Kind::kEnd) {
    if (roll_.active() && page.server().error_kind.load() == 0)
      throw RollForwardRefused("the program ends within the step");
    publish_medians();
    if (page.server().error_kind.load() == 0) {
      communicators_.wait_for_all(state_.table());
      driver_.synchronize();  // a peer may still wait for what is queued
    }
    page.shared().session_state.store(static_cast<uint32_t>(replay::SessionState::kClosed));
    reply(body, nullptr, 0, ErrorKind::kNone);
    return;
  }
  if (page.server().error_kind.load(std::memory_order_relaxed) !=
      0) {  // the program failed: nothing runs any more
    if (sync) {
      const std::string message = replay::text_of(page.server().error_message) + " [device call " +
                                  replay::text_of(page.server().error_operator) + ", record " +
                                  std::to_string(page.server().error_index) + "]";
      reply(body, message.data(), message.size(), static_cast<ErrorKind>(page.server().error_kind.load()));
    }
    return;
  }
  try {
    if (__builtin_expect(step_digest_.active(), 0)) step_digest_.add(r, words, templates_, state_);
    if (__builtin_expect(roll_.active(), 0) && !runs_in_roll(r, body, words)) return;
    switch (kind) {
      case Kind::kOperator:
        run_operator(r, words);
        if (__builtin_expect(launches_block(), 0)) {
          driver_.synchronize();
          checked_index_ = at_.index + 1;
        }
        return;
      case Kind::kOperatorSync:
        return run_operator_sync(r, body, words);
      case Kind::kPad:
      case Kind::kFree:
      case Kind::kEnd:
        return;
      case Kind::kAllocate:
        state_.create(r.aux, state_.allocate_cleared(checked_bytes(words.next())));
        return;
      case Kind::kResize: {
        const uint64_t bytes = checked_bytes(words.next());
        c10::Storage fresh = state_.allocate_cleared(bytes);
        const c10::Storage& old = state_.write(r.aux);
        if (const uint64_t kept = std::min<uint64_t>(bytes, old.nbytes()); kept != 0) {
          std::vector<uint8_t> content(kept);
          driver_.to_host(old, 0, kept, content.data());
          driver_.from_host(fresh, 0, kept, content.data());
        }
        driver_.streams().use_here(old);  // its pre-image may yet have to be copied
        return state_.table().replace(r.aux, std::move(fresh));
      }
      case Kind::kHostToDevice: {
        const uint64_t offset = words.next(), bytes = words.next();
        const uint8_t* payload = words.take_bytes(bytes);
        const c10::Storage& to = state_.write(r.aux);
        if (offset > to.nbytes() || bytes > to.nbytes() - offset)
          throw LogError("a payload does not fit its buffer");
        return driver_.upload(to, offset, bytes, payload);
      }
      case Kind::kDeviceToHost: {
        const uint64_t offset = words.next(), bytes = words.next();
        const c10::Storage& from = state_.read(r.aux);
        if (offset > from.nbytes() || bytes > from.nbytes() - offset)
          throw LogError("a read reaches behind its buffer");
        if (from.device().is_cpu())
          return reply(body, static_cast<const uint8_t*>(from.data()) + offset, bytes, ErrorKind::kNone);
        std::vector<uint8_t> content(bytes);
        driver_.to_host(from, offset, bytes, content.data());
        passed_.current_passed(at_.index + 1);
        return reply(body, content.data(), bytes, ErrorKind::kNone);
      }
      case Kind::kSeed:
        return state_.generator(r.aux).set_current_seed(words.next());
      case Kind::kGeneratorGet: {
        const std::vector<uint8_t> state = state_.generator_state(r.aux);
        return reply(body, state.data(), state.size(), ErrorKind::kNone);
      }
      case Kind::kGeneratorSet: {
        const uint64_t bytes = words.next();
        const uint8_t* content = words.take_bytes(bytes);
        return state_.set_generator_state(r.aux, content, bytes);
      }
      case Kind::kGeneratorFree:
        return state_.forget_generator(r.aux);
      case Kind::kPhase: {
        if (r.aux > static_cast<uint64_t>(replay::Phase::kOptimizer)) throw LogError("unknown phase");
        page.server().phase.store(static_cast<uint32_t>(r.aux), std::memory_order_relaxed);
        in_step_ = static_cast<replay::Phase>(r.aux) == replay::Phase::kOptimizer;
        if (in_step_ && state_.steps_are_final()) step_digest_.begin();
        return state_.phase(static_cast<replay::Phase>(r.aux));
      }
      case Kind::kCommit:
        if (static_cast<replay::CommitKind>(r.aux) == replay::CommitKind::kStep) end_of_step();
        commit_pending_ = true;
        in_step_ = false;
        step_digest_.end();
        return;
      case Kind::kSetting:
        return state_.settings().set(static_cast<replay::Setting>(r.aux), words.next());
      case Kind::kEnvironment: {
        const uint64_t bytes = words.next();
        const auto* text = reinterpret_cast<const char*>(words.take_bytes(bytes));
        return state_.settings().set_environment({text, bytes});
      }
      case Kind::kCommunicatorCreate:
        return communicators_.create(r.aux, words);
      case Kind::kCommunicatorDestroy:
        return communicators_.destroy(r.aux, state_.table());
      case Kind::kCollective:
        return communicators_.start(r.aux, words, state_);
      case Kind::kSynchronize:
        switch (static_cast<replay::WaitFor>(r.aux)) {
          case replay::WaitFor::kEverything:
            communicators_.wait_for_all(state_.table());
            break;
          case replay::WaitFor::kStream:
            break;
          case replay::WaitFor::kMark:
            if (!pass_mark(words.next())) break;
            return reply(body, nullptr, 0, ErrorKind::kNone);
          case replay::WaitFor::kBarrier:
            communicators_.wait_for_barrier(words.next(), state_.table());
            break;
          default:
            throw LogError("nobody knows what to wait for");
        }
        driver_.synchronize();
        passed_.all_passed(at_.index + 1);
        return reply(body, nullptr, 0, ErrorKind::kNone);
      case Kind::kStream:
      case Kind::kStreamMark:
      case Kind::kStreamWait:
      case Kind::kStreamUse:
        return state_.run_stream_record(kind, r.aux, words);
      case Kind::kMemory: {
        const auto report = report_memory(static_cast<replay::MemoryQuery>(r.aux), state_, driver_);
        return reply(body, &report, sizeof report, ErrorKind::kNone, /*comparable=*/false);
      }
    }
  } catch (const CollectiveError&) {
    throw;
  } catch (const DriverError&) {
    throw;
  } catch (const RollForwardRefused&) {
    throw;
  } catch (const LogError&) {
    throw;
  } catch (const replay::ContentLost&) {
    throw;
  } catch (const replay::RewindError& e) {
    throw LogError(e.what());
  } catch (const c10::Error& e) {
    if (driver_.lost(e)) throw;
    if (driver_.device().is_cuda() && library_error(e.what())) ask_device(r);
    const std::string message = e.what_without_backtrace() + when_it_happened(e.what());
    if (driver_.device().is_cuda() && driver_error(message) && kind_of(e) == ErrorKind::kRuntime)
      throw DriverError(message + " [device call " + call_name(r) + ", record " + std::to_string(r.index) +
                        "]");
    if (sync)
      reply(body, message.data(), message.size(), kind_of(e));
    else
      program_error(r, kind_of(e), message);
  } catch (const std::bad_alloc&) {
    const std::string message =
        "CUDA out of memory: the device server could not allocate what this call needs";
    if (sync)
      reply(body, message.data(), message.size(), ErrorKind::kOutOfMemory);
    else
      program_error(r, ErrorKind::kOutOfMemory, message);
  } catch (const std::exception& e) {
    const std::string message = e.what();
    if (sync)
      reply(body, message.data(), message.size(), ErrorKind::kRuntime);
    else
      program_error(r, ErrorKind::kRuntime, message);
  }
}

}  // namespace understudy::server
