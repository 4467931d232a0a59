#include "proxy_client/csrc/session.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/generators.h"
#include "proxy_client/csrc/device/streams.h"
#include "proxy_client/csrc/minibatch_contents.h"
#include "proxy_client/csrc/settings.h"

namespace understudy::client {
namespace {

using replay::ErrorKind;
using replay::Phase;

constexpr uint64_t kFirstHandle = 1;
constexpr uint64_t kEventPatienceNs = 1'000'000'000;
constexpr uint64_t kAutomaticCommitRecords = 1'000'000;
constexpr uint64_t kCommitRecordsWithoutSteps = 4'096;  // some 50 ms of replay
constexpr uint64_t kCommitCollectivesWithoutSteps = 128;

struct Session {
  std::mutex opening;  // taken without the GIL
  Interpreter interpreter;
  std::unique_ptr<LogWriter> writer;
  std::atomic<LogWriter*> log{nullptr};
  std::atomic<c10::DeviceIndex> device{-1};
  std::atomic<bool> forked{false};
  std::atomic<uint64_t> next_handle{kFirstHandle};

  std::atomic<bool> in_optimizer{false};
  std::atomic<uint64_t> committed_bytes{0}, committed_records{0};
};

Session& session() {
  // Never destroyed: other threads may still free buffers while the process ends.
  static Session& instance = *std::make_unique<Session>().release();
  return instance;
}

[[noreturn]] void raise_unusable() {
  if (in_bad_fork())
    TORCH_CHECK(
        false,
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
        "the 'spawn' start method");
  TORCH_CHECK(false, "the device session of this worker has ended");
}

uint64_t automatic_commit_bytes(const LogWriter& log) {
  static const uint64_t asked = [] {
    const char* text = std::getenv("UNDERSTUDY_AUTO_COMMIT_BYTES");
    return text ? std::strtoull(text, nullptr, 10) : uint64_t{0};
  }();
  return asked != 0 ? asked : replay::automatic_commit_bytes(log.page().fixed());
}

LogWriter& open_session(c10::DeviceIndex device) {
  Session& s = session();
  TORCH_CHECK(s.interpreter.open_session, "the virtual device was not activated by proxyrun");
  std::unique_lock<std::mutex> lock(s.opening, std::defer_lock);
  // Opening talks to proxyd through Python, so whoever waits for it here must not hold the GIL.
  s.interpreter.without_gil([&] { lock.lock(); });
  if (LogWriter* log = s.log.load(std::memory_order_acquire)) return *log;
  if (s.forked.load()) raise_unusable();
  std::string directory;
  s.interpreter.without_gil([&] { directory = s.interpreter.open_session(physical_index(device)); });
  s.writer = std::make_unique<LogWriter>(directory);
  pthread_atfork(nullptr, nullptr, [] { session().forked.store(true); });
  send_settings(*s.writer);
  send_default_generator(*s.writer, device);
  s.device.store(device);
  s.log.store(s.writer.get());
  if (streams_in_use()) use_streams();
  return *s.writer;
}

void commit(LogWriter& log, replay::CommitKind kind) {
  Session& s = session();
  append(log, Kind::kCommit, static_cast<uint64_t>(kind), 0, [kind](uint64_t*) {
    if (kind == replay::CommitKind::kStep) end_minibatch();
  });
  s.in_optimizer.store(false, std::memory_order_relaxed);
  s.committed_bytes.store(log.bytes(), std::memory_order_relaxed);
  s.committed_records.store(log.records(), std::memory_order_relaxed);
}

// An optimizer that is none of torch.optim ends its minibatches unseen.
bool never_stepped(const LogWriter& log) {
  return log.page().worker().worker_steps.load(std::memory_order_relaxed) == 0;
}

}  // namespace

void set_interpreter(Interpreter interpreter) { session().interpreter = std::move(interpreter); }

LogWriter& log_for(c10::DeviceIndex device) {
  Session& s = session();
  LogWriter* log = s.log.load(std::memory_order_acquire);
  if (C10_UNLIKELY(!log)) log = &open_session(device);
  const c10::DeviceIndex bound = s.device.load(std::memory_order_relaxed);
  TORCH_CHECK(
      device == bound, "this worker is bound to cuda:", static_cast<int>(bound),
      " and cannot use cuda:", static_cast<int>(device),
      "; a worker process has one device: start one process per device (torchrun --nproc-per-node N), "
      "each with its own torch.cuda.set_device(local_rank), or show this one a single device with "
      "CUDA_VISIBLE_DEVICES=0 (where a library spreads a model over all it sees, as device_map='auto' does)");
  if (C10_UNLIKELY(!log->usable())) raise_unusable();
  return *log;
}

LogWriter* log_if_open() noexcept {
  LogWriter* log = session().log.load(std::memory_order_acquire);
  return log && log->usable() ? log : nullptr;
}

c10::DeviceIndex bound_device() noexcept {
  const c10::DeviceIndex bound = session().device.load(std::memory_order_relaxed);
  return bound >= 0 ? bound : current_device();
}

bool in_bad_fork() noexcept { return session().forked.load(std::memory_order_relaxed); }

void close_session() {
  LogWriter* log = log_if_open();
  if (!log) return;
  try {
    log->close();
  } catch (const replay::RemoteError& error) {
    raise_as_torch_error(error);
  }
}

uint64_t new_handles(uint64_t count) noexcept {
  return session().next_handle.fetch_add(count, std::memory_order_relaxed);
}

void raise_as_torch_error(const replay::RemoteError& error) {
  const std::string message = error.what();
  switch (error.kind) {
    case ErrorKind::kIndex:
      C10_THROW_ERROR(IndexError, message);
    case ErrorKind::kValue:
      C10_THROW_ERROR(ValueError, message);
    case ErrorKind::kType:
      C10_THROW_ERROR(TypeError, message);
    case ErrorKind::kNotImplemented:
      C10_THROW_ERROR(NotImplementedError, message);
    case ErrorKind::kOutOfMemory:
      C10_THROW_ERROR(OutOfMemoryError, message);
    case ErrorKind::kDistributed:
      C10_THROW_ERROR(DistBackendError, message);
    case ErrorKind::kLinAlg:
      C10_THROW_ERROR(LinAlgError, message);
    case ErrorKind::kBuffer:
      C10_THROW_ERROR(BufferError, message);
    default:
      C10_THROW_ERROR(Error, message);
  }
}

void synchronize(replay::WaitFor what, uint64_t of) {
  LogWriter* log = log_if_open();
  if (!log) return;
  const uint64_t before = next_record();
  call(
      *log, Kind::kSynchronize, static_cast<uint64_t>(what), 1, [&](uint64_t* body) { *body = of; },
      [](const uint8_t*, size_t) {});
  if (what != replay::WaitFor::kMark) log->note_all_passed(before);
  commit_if_due();
}

uint64_t next_record() {
  const LogWriter* log = log_if_open();
  return log ? log->page().worker().tail_index.load(std::memory_order_relaxed) : 0;
}

// A device that hangs, and a peer that does not come, are noticed while the server waits for them: so it is
// asked to, in the end.
void wait_for_records_before(uint64_t index, uint64_t stream, uint64_t mark) {
  LogWriter* log = log_if_open();
  if (!log) return;
  raise_if_failed(*log);
  if (!log->wait_until_passed(index, stream, kEventPatienceNs)) {
    if (mark == 0) return synchronize(replay::WaitFor::kStream);
    synchronize(replay::WaitFor::kMark, mark);
    return log->note_passed(index, stream);
  }
  raise_if_failed(*log);
  commit_if_due();
}

bool has_passed(uint64_t index, uint64_t stream) {
  LogWriter* log = log_if_open();
  if (!log) return true;
  raise_if_failed(*log);
  return log->has_passed(index, stream);
}

bool has_passed_all(uint64_t stream) {
  const LogWriter* log = log_if_open();
  return !log || has_passed(log->end_of_stream(stream), stream);
}

// Whoever makes the first stream, or opens the session meanwhile, sees what the other has done.
void use_streams() {
  if (LogWriter* log = log_if_open()) log->use_streams(&stream_of_this_thread);
}

void begin_optimizer_phase() {
  LogWriter* log = log_if_open();
  if (!log) return;
  append(*log, Kind::kPhase, static_cast<uint64_t>(Phase::kOptimizer));
  session().in_optimizer.store(true, std::memory_order_relaxed);
}

void commit_step() {
  LogWriter* log = log_if_open();
  if (!log) return;
  commit(*log, replay::CommitKind::kStep);
  log->page().worker().worker_steps.fetch_add(1, std::memory_order_release);
}

uint64_t snapshot_to_describe() {
  const LogWriter* log = log_if_open();
  if (!log) return 0;
  const auto page = log->page();
  const uint64_t step = page.worker().worker_steps.load(std::memory_order_relaxed) + 1;
  uint64_t newest = 0;
  for (uint64_t i = 0; i < replay::kSnapshotOrders; i++) {
    const uint64_t order = page.daemon().snapshot_orders[i].load(std::memory_order_acquire);
    const uint64_t serial = replay::serial_of(order);
    const bool wanted = serial == page.daemon().snapshot_described[i].load(std::memory_order_acquire);
    if (wanted && replay::step_of(order) == step) newest = std::max(newest, serial);
  }
  return newest;
}

uint64_t step_to_describe() {
  const LogWriter* log = log_if_open();
  if (!log || log->page().daemon().describe_steps.load(std::memory_order_acquire) == 0) return 0;
  return log->page().worker().worker_steps.load(std::memory_order_relaxed) + 1;
}

void commit_if_due() {
  Session& s = session();
  LogWriter* log = log_if_open();
  if (!log || s.in_optimizer.load(std::memory_order_relaxed)) return;
  const uint64_t bytes = log->bytes() - s.committed_bytes.load(std::memory_order_relaxed);
  const uint64_t records = log->records() - s.committed_records.load(std::memory_order_relaxed);
  // Minibatches of a rank alone that no optimizer ends do so where it reads its loss, as a rule.
  const bool soon = never_stepped(*log) && log->page().fixed().world == 1;
  if (bytes > automatic_commit_bytes(*log) ||
      records > (soon ? kCommitRecordsWithoutSteps : kAutomaticCommitRecords))
    commit(*log, replay::CommitKind::kAutomatic);
}

void commit_after_collective(LogWriter& log, int ranks, uint64_t number) {
  const bool of_all = static_cast<uint64_t>(ranks) == log.page().fixed().world;
  if (of_all && number % kCommitCollectivesWithoutSteps == 0 && never_stepped(log) &&
      !session().in_optimizer.load(std::memory_order_relaxed))
    commit(log, replay::CommitKind::kAutomatic);
}

bool device_is_busy() {
  const LogWriter* log = log_if_open();
  if (!log) return false;
  const uint64_t done = log->page().server().cursor_index.load(std::memory_order_relaxed);
  return done < log->page().worker().tail_index.load(std::memory_order_relaxed);
}

}  // namespace understudy::client
