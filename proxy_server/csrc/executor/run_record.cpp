// Running one record: the device server's whole repertoire, one arm per kind.
#include <ATen/native/Resize.h>

#include <algorithm>
#include <cstring>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/executor/executor.h"
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
void Executor::reply(Session& s, uint64_t* reply_words, const void* data, uint64_t bytes, ErrorKind error,
                     bool comparable) {
  auto& page = s.log.page();
  if (s.driver.device().is_cuda()) {
    // A collective that park() aborted ends without an error and leaves anything in its buffers.
    if (requests_.goes_back_anyway()) throw CollectiveError("communication was aborted");
    s.checked_index = s.at.index + 1;
  }
  const uint64_t sequence = reply_words[0];
  const uint64_t seen = replay::digest(data, bytes);
  if (page.reply_sequence.load() >= sequence) {
    if (!comparable) return;
    page.replies_compared.fetch_add(1);
    if (reply_words[1] != seen) {
      page.replies_different.fetch_add(1);
      std::fprintf(stderr,
                   "understudy: rank %u, record %llu: the replayed value differs from the delivered one\n",
                   page.rank, static_cast<unsigned long long>(s.at.index));
    }
    return;
  }
  if (bytes > s.log.reply_bytes() - sizeof(replay::ReplyHeader)) throw LogError("a reply is too large");
  if (!s.log.reserve_reply(sizeof(replay::ReplyHeader) + bytes)) {
    const std::string message = "shared memory is full: /dev/shm has no room for a value of " +
                                std::to_string(bytes) + " bytes that the program reads";
    return reply(s, reply_words, message.data(), message.size(), ErrorKind::kOutOfMemory, comparable);
  }
  auto* header = reinterpret_cast<replay::ReplyHeader*>(s.log.reply());
  *header = {bytes, static_cast<uint32_t>(error), 0};
  if (bytes != 0) std::memcpy(header + 1, data, bytes);
  reply_words[1] = seen;
  page.cursor.store(s.at.offset, std::memory_order_relaxed);
  page.reply_sequence.store(sequence, std::memory_order_seq_cst);
  page.reply_futex.fetch_add(1);
  if (page.worker_sleeping.load(std::memory_order_seq_cst) != 0) replay::futex_wake(page.reply_futex);
}

std::string Executor::call_name(Session& s, const Record& r) const {
  const auto kind = static_cast<Kind>(r.kind);
  if (replay::is_operator(kind))
    if (const Template* known = s.templates.find_parsed(r.aux)) return known->name;
  return replay::name_of(kind);
}

void Executor::program_error(Session& s, const Record& r, ErrorKind kind, const std::string& message) {
  auto& page = s.log.page();
  if (page.error_kind.load() != 0) return;
  std::snprintf(page.error_operator, sizeof page.error_operator, "%s", call_name(s, r).c_str());
  std::snprintf(page.error_message, sizeof page.error_message, "%s", message.c_str());
  page.error_index = r.index;
  page.error_kind.store(static_cast<uint32_t>(kind), std::memory_order_release);
}

// While an optimizer step is finished with contents of its end: whether the record is to be run.
bool Executor::runs_in_roll(Session& s, const Record& r, const uint64_t* reply_words, Words words) {
  switch (static_cast<Kind>(r.kind)) {
    case Kind::kOperator:
      return s.roll.runs_operator(s.templates.find(r.aux), words, *s.state);
    case Kind::kOperatorSync:
      s.roll.check_sync_operator(s.templates.find(r.aux), words);
      return true;
    case Kind::kHostToDevice:
      return s.roll.runs_upload(r.aux);
    case Kind::kDeviceToHost:
      return s.roll.runs_read(r.aux, s.log.page().reply_sequence.load() >= reply_words[0]);
    case Kind::kResize:
      s.roll.check_resize(r.aux);
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
void Executor::ask_device(Session& s, const Record& r) const {
  try {
    s.driver.synchronize();
  } catch (const c10::Error& e) {
    if (s.driver.lost(e)) throw;
    throw DriverError(std::string(e.what_without_backtrace()) + " [device call " + call_name(s, r) +
                      ", record " + std::to_string(r.index) + "]");
  }
}

// Waits for that alone; whether it is known.
bool Executor::pass_mark(Session& s, uint64_t mark) {
  const ScriptStreams::Mark* const known = s.driver.streams().find(mark);
  if (known == nullptr) return s.driver.streams().is_past(mark);
  if (!known->event) return false;
  s.communicators.wait_for_queued([known] { return known->event->query(); });
  known->event->synchronize();
  return true;
}

void Executor::run_record(Session& s, const Record& r, uint64_t* body) {
  const auto kind = static_cast<Kind>(r.kind);
  auto& page = s.log.page();
  const uint64_t count = (r.bytes - sizeof(Record)) / 8 - r.frees;
  const bool sync = replay::is_sync(kind);
  if (sync && count < 2) throw LogError("a sync record is too short");
  Words words(body + (sync ? 2 : 0), count - (sync ? 2 : 0));
  if (kind == Kind::kEnd) {
    if (s.roll.active() && page.error_kind.load() == 0)
      throw RollForwardRefused("the program ends within the step");
    publish_medians(s);
    if (page.error_kind.load() == 0) {
      s.communicators.wait_for_all(s.state->table());
      s.driver.synchronize();  // a peer may still wait for what is queued
    }
    page.session_state.store(static_cast<uint32_t>(replay::SessionState::kClosed));
    reply(s, body, nullptr, 0, ErrorKind::kNone);
    return;
  }
  if (page.error_kind.load(std::memory_order_relaxed) != 0) {  // the program failed: nothing runs any more
    if (sync) {
      const std::string message = replay::text_of(page.error_message) + " [device call " +
                                  replay::text_of(page.error_operator) + ", record " +
                                  std::to_string(page.error_index) + "]";
      reply(s, body, message.data(), message.size(), static_cast<ErrorKind>(page.error_kind.load()));
    }
    return;
  }
  try {
    if (__builtin_expect(s.step_digest.active(), 0)) s.step_digest.add(r, words, s.templates, *s.state);
    if (__builtin_expect(s.roll.active(), 0) && !runs_in_roll(s, r, body, words)) return;
    switch (kind) {
      case Kind::kOperator:
        run_operator(s, r, words);
        if (__builtin_expect(s.launches_block(), 0)) {
          s.driver.synchronize();
          s.checked_index = s.at.index + 1;
        }
        return;
      case Kind::kOperatorSync:
        return run_operator_sync(s, r, body, words);
      case Kind::kPad:
      case Kind::kFree:
      case Kind::kEnd:
        return;
      case Kind::kAllocate:
        s.state->create(r.aux, s.state->allocate_cleared(checked_bytes(words.next())));
        return;
      case Kind::kResize: {
        const uint64_t bytes = checked_bytes(words.next());
        c10::Storage fresh = s.state->allocate_cleared(bytes);
        const c10::Storage& old = s.state->write(r.aux);
        if (const uint64_t kept = std::min<uint64_t>(bytes, old.nbytes()); kept != 0) {
          std::vector<uint8_t> content(kept);
          s.driver.to_host(old, 0, kept, content.data());
          s.driver.from_host(fresh, 0, kept, content.data());
        }
        s.driver.streams().use_here(old);  // its pre-image may yet have to be copied
        return s.state->table().replace(r.aux, std::move(fresh));
      }
      case Kind::kHostToDevice: {
        const uint64_t offset = words.next(), bytes = words.next();
        const uint8_t* payload = words.take_bytes(bytes);
        const c10::Storage& to = s.state->write(r.aux);
        if (offset > to.nbytes() || bytes > to.nbytes() - offset)
          throw LogError("a payload does not fit its buffer");
        return s.driver.upload(to, offset, bytes, payload);
      }
      case Kind::kDeviceToHost: {
        const uint64_t offset = words.next(), bytes = words.next();
        const c10::Storage& from = s.state->read(r.aux);
        if (offset > from.nbytes() || bytes > from.nbytes() - offset)
          throw LogError("a read reaches behind its buffer");
        if (from.device().is_cpu())
          return reply(s, body, static_cast<const uint8_t*>(from.data()) + offset, bytes, ErrorKind::kNone);
        std::vector<uint8_t> content(bytes);
        s.driver.to_host(from, offset, bytes, content.data());
        s.passed.current_passed(s.at.index + 1);
        return reply(s, body, content.data(), bytes, ErrorKind::kNone);
      }
      case Kind::kSeed:
        return s.state->generator(r.aux).set_current_seed(words.next());
      case Kind::kGeneratorGet: {
        const std::vector<uint8_t> state = s.state->generator_state(r.aux);
        return reply(s, body, state.data(), state.size(), ErrorKind::kNone);
      }
      case Kind::kGeneratorSet: {
        const uint64_t bytes = words.next();
        const uint8_t* content = words.take_bytes(bytes);
        return s.state->set_generator_state(r.aux, content, bytes);
      }
      case Kind::kGeneratorFree:
        return s.state->forget_generator(r.aux);
      case Kind::kPhase: {
        if (r.aux > static_cast<uint64_t>(replay::Phase::kOptimizer)) throw LogError("unknown phase");
        page.phase.store(static_cast<uint32_t>(r.aux), std::memory_order_relaxed);
        s.in_step = static_cast<replay::Phase>(r.aux) == replay::Phase::kOptimizer;
        if (s.in_step && s.state->steps_are_final()) s.step_digest.begin();
        return s.state->phase(static_cast<replay::Phase>(r.aux));
      }
      case Kind::kCommit:
        if (static_cast<replay::CommitKind>(r.aux) == replay::CommitKind::kStep) end_of_step(s);
        s.commit_pending = true;
        s.in_step = false;
        s.step_digest.end();
        return;
      case Kind::kSetting:
        return s.state->settings().set(static_cast<replay::Setting>(r.aux), words.next());
      case Kind::kEnvironment: {
        const uint64_t bytes = words.next();
        const auto* text = reinterpret_cast<const char*>(words.take_bytes(bytes));
        return s.state->settings().set_environment({text, bytes});
      }
      case Kind::kCommunicatorCreate:
        return s.communicators.create(r.aux, words);
      case Kind::kCommunicatorDestroy:
        return s.communicators.destroy(r.aux, s.state->table());
      case Kind::kCollective:
        return s.communicators.start(r.aux, words, *s.state);
      case Kind::kSynchronize:
        switch (static_cast<replay::WaitFor>(r.aux)) {
          case replay::WaitFor::kEverything:
            s.communicators.wait_for_all(s.state->table());
            break;
          case replay::WaitFor::kStream:
            break;
          case replay::WaitFor::kMark:
            if (!pass_mark(s, words.next())) break;
            return reply(s, body, nullptr, 0, ErrorKind::kNone);
          case replay::WaitFor::kBarrier:
            s.communicators.wait_for_barrier(words.next(), s.state->table());
            break;
          default:
            throw LogError("nobody knows what to wait for");
        }
        s.driver.synchronize();
        s.passed.all_passed(s.at.index + 1);
        return reply(s, body, nullptr, 0, ErrorKind::kNone);
      case Kind::kStream:
      case Kind::kStreamMark:
      case Kind::kStreamWait:
      case Kind::kStreamUse:
        return s.state->run_stream_record(kind, r.aux, words);
      case Kind::kMemory: {
        const auto report = report_memory(static_cast<replay::MemoryQuery>(r.aux), *s.state, s.driver);
        return reply(s, body, &report, sizeof report, ErrorKind::kNone, /*comparable=*/false);
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
    if (s.driver.lost(e)) throw;
    if (s.driver.device().is_cuda() && library_error(e.what())) ask_device(s, r);
    const std::string message = e.what_without_backtrace() + when_it_happened(s, e.what());
    if (s.driver.device().is_cuda() && driver_error(message) && kind_of(e) == ErrorKind::kRuntime)
      throw DriverError(message + " [device call " + call_name(s, r) + ", record " + std::to_string(r.index) +
                        "]");
    if (sync)
      reply(s, body, message.data(), message.size(), kind_of(e));
    else
      program_error(s, r, kind_of(e), message);
  } catch (const std::bad_alloc&) {
    const std::string message =
        "CUDA out of memory: the device server could not allocate what this call needs";
    if (sync)
      reply(s, body, message.data(), message.size(), ErrorKind::kOutOfMemory);
    else
      program_error(s, r, ErrorKind::kOutOfMemory, message);
  } catch (const std::exception& e) {
    const std::string message = e.what();
    if (sync)
      reply(s, body, message.data(), message.size(), ErrorKind::kRuntime);
    else
      program_error(s, r, ErrorKind::kRuntime, message);
  }
}

}  // namespace understudy::server
