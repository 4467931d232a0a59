#include "replay/csrc/log/log_writer.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace understudy::replay {
namespace {

// A sleeping server is woken at once where it has a core of its own; elsewhere every wake-up interrupts the
// worker, so only for this much, a sync record or a collective.
constexpr uint64_t kWakeBytes = 32 << 10;
constexpr uint64_t kYieldNs = 1000000;  // how long a waiting worker offers its core before it sleeps
constexpr uint64_t kCrowdedNs = 20000;  // an offer that takes longer than this was accepted
constexpr size_t kWarmSegments = 24;    // free segments whose pages are kept

// A forked child shares no log with its parent: its copies of these writers refuse to work.
std::mutex& registry_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::vector<std::atomic<bool>*>& registry() {
  static std::vector<std::atomic<bool>*> flags;
  return flags;
}
void poison_in_child() {
  for (std::atomic<bool>* flag : registry()) flag->store(false);
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

LogWriter::LogWriter(const std::string& directory) : map_(directory) {
  if (page().worker().tail.load() != 0) throw LogError(directory + " already has a writer");
  map_.keep_out_of_forks();
  region_end_ = map_.region_bytes();
  std::lock_guard<std::mutex> lock(registry_mutex());
  if (registry().empty()) pthread_atfork(nullptr, nullptr, poison_in_child);
  registry().push_back(&usable_);
  // Spinning for a reply pays only where server and worker have a core each.
  spin_ns_ = available_cores() >= 2 * static_cast<int>(page().fixed().world) ? 30000 : 0;
  if (const char* text = std::getenv("UNDERSTUDY_SPIN_US"))
    spin_ns_ = std::strtoull(text, nullptr, 10) * 1000;
  // Below a relay there is a pid namespace, and proxyd outside of it.
  if (const char* relay = std::getenv("UNDERSTUDY_RELAY"); relay && *relay) runtime_ = directory + "/../..";
  wake_bytes_ = spin_ns_ != 0 ? 0 : kWakeBytes;
}

LogWriter::~LogWriter() {
  std::lock_guard<std::mutex> lock(registry_mutex());
  auto& flags = registry();
  flags.erase(std::remove(flags.begin(), flags.end(), &usable_), flags.end());
}

void LogWriter::append_together(Kind kind, uint64_t aux, const std::vector<std::vector<uint64_t>>& bodies) {
  uint64_t bytes = 0;
  for (const auto& body : bodies) bytes += sizeof(Record) + 8 * body.size();
  {
    std::lock_guard<QuickLock> lock(lock_);
    if (stream_of_thread_.load(std::memory_order_relaxed) != nullptr) enter_stream();
    if (bytes <= map_.segment_bytes() / 2) make_room(bytes);
    for (const auto& body : bodies)
      write(kind, aux, body.size(), [&](uint64_t* to) { std::copy(body.begin(), body.end(), to); });
  }
  if (page().shared().server_sleeping.load(std::memory_order_seq_cst) != 0) wake_server(kind);
}

void LogWriter::use_streams(uint64_t (*of_thread)()) {
  const std::lock_guard<QuickLock> lock(lock_);
  ends_[0].store(next_index_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  stream_of_thread_.store(of_thread);
}

void LogWriter::enter_stream() {
  const uint64_t stream = stream_of_thread_.load(std::memory_order_relaxed)();
  if (stream == stream_) return;
  write(Kind::kStream, stream, 0, [](uint64_t*) {});
  stream_ = stream;
}

// The record that is about to be published.
void LogWriter::count_for_stream(Kind kind, uint64_t first_word) {
  const bool names_it = kind == Kind::kStreamMark || kind == Kind::kStreamWait || kind == Kind::kStreamUse;
  if (!names_it && !is_enqueued(kind)) return;
  ends_[place_of_stream(names_it ? first_word : stream_)].store(
      next_index_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void LogWriter::free_later(uint64_t handle) {
  if (!usable()) return;
  size_t pending;
  {
    std::lock_guard<QuickLock> lock(free_lock_);
    pending_frees_.push_back(handle);
    pending = pending_frees_.size();
    pending_free_count_.store(pending, std::memory_order_relaxed);
  }
  if (pending >= kMaxFrees) append(Kind::kFree, 0, 0, [](uint64_t*) {});
}

void LogWriter::collect_frees() {
  std::lock_guard<QuickLock> lock(free_lock_);
  if (pending_frees_.size() <= kMaxFrees) {
    taken_frees_.swap(pending_frees_);
  } else {
    taken_frees_.assign(pending_frees_.end() - kMaxFrees, pending_frees_.end());
    pending_frees_.resize(pending_frees_.size() - kMaxFrees);
  }
  pending_free_count_.store(pending_frees_.size(), std::memory_order_relaxed);
}

// The record does not fit the rest of the current segment: a pad record fills it.
uint64_t LogWriter::make_room_elsewhere(uint64_t bytes) {
  if (bytes > map_.segment_bytes() / 2)
    throw LogError("a record of " + std::to_string(bytes) + " bytes is too large for the log");
  fill_segment();
  begin_segment();
  return segment_begin_;
}

void LogWriter::fill_segment() {
  const uint64_t offset = offset_.load(std::memory_order_relaxed);
  if (offset == segment_end_) return;
  auto* pad = reinterpret_cast<Record*>(segment_ + (offset - segment_begin_));  // publish() kept room for it
  pad->bytes = static_cast<uint32_t>(segment_end_ - offset);
  pad->kind = static_cast<uint16_t>(Kind::kPad);
  pad->frees = 0;
  pad->aux = 0;
  publish(pad, segment_end_);
}

// A full log and a full /dev/shm are the same to the program: it waits until the server has let go of
// records.
void LogWriter::begin_segment() {
  const auto found = [this] {
    reclaim_segments();
    if (free_segments_.empty() && untouched_segment_ < map_.segment_count())
      free_segments_.push_back(untouched_segment_++);
    if (free_segments_.empty()) return false;
    uint8_t* segment = map_.segments() + free_segments_.back() * map_.segment_bytes();
    if (reserve_memory(segment, map_.segment_bytes())) return true;
    give_memory_back(segment, map_.segment_bytes());  // what there was of it: the server needs it more
    return false;
  };
  if (!found()) {
    if (next_segment_ == reclaimed_segments_)
      throw LogError("shared memory is full: /dev/shm has no room for a segment of the log (" +
                     std::to_string(map_.segment_bytes() >> 20) + " MiB)");
    wait_for_room(found);
  }
  const uint32_t physical = free_segments_.back();
  free_segments_.pop_back();
  page().segments().of[next_segment_ % map_.segment_count()] = physical;
  segment_ = map_.segments() + physical * map_.segment_bytes();
  segment_begin_ = next_segment_ * map_.segment_bytes();
  segment_end_ = segment_begin_ + map_.segment_bytes();
  next_segment_++;
}

void LogWriter::reclaim_segments() {
  const uint64_t freed =
      std::min(page().server().freed_segments.load(std::memory_order_acquire), next_segment_);
  for (; reclaimed_segments_ < freed; reclaimed_segments_++) {
    const uint32_t physical = page().segments().of[reclaimed_segments_ % map_.segment_count()];
    if (free_segments_.size() >= kWarmSegments)  // give the memory back after a burst (loading a model, say)
      madvise(map_.segments() + physical * map_.segment_bytes(), map_.segment_bytes(), MADV_REMOVE);
    free_segments_.push_back(physical);
  }
}

// The server sleeps, or is about to.
void LogWriter::wake_server(Kind kind) {
  const WorkerPage p = page();
  const uint64_t pending =
      offset_.load(std::memory_order_relaxed) - p.server().cursor.load(std::memory_order_relaxed);
  if (!is_sync(kind) && kind != Kind::kCollective && pending < wake_bytes_) return;
  // One call wakes it, however long it takes until it runs.
  if (p.shared().server_sleeping.exchange(0, std::memory_order_seq_cst) == 0) return;
  p.shared().tail_futex.fetch_add(1);
  futex_wake(p.shared().tail_futex);
  wakes_.fetch_add(1, std::memory_order_relaxed);
}

// Waits without sleeping, where there are cores enough for that.
template <class Arrived>
bool LogWriter::arrives_soon(const Arrived& arrived) const {
  if (spin_ns_ == 0) return false;
  for (const uint64_t until = now_ns() + spin_ns_; now_ns() < until;)
    for (int i = 0; i < 20; i++) {
      if (arrived()) return true;
      cpu_relax();
    }
  // To be woken takes 50 us and more. Whoever else wants this core has it at once, and then keeps it:
  // who waits without sleeping would be served late.
  const uint64_t until = now_ns() + kYieldNs;
  for (uint64_t before = now_ns(), now = before; now < until && now - before < kCrowdedNs;) {
    if (arrived()) return true;
    before = now;
    sched_yield();
    now = now_ns();
  }
  return false;
}

void LogWriter::note_passed(uint64_t index, uint64_t stream) {
  std::atomic<uint64_t>& seen = seen_[place_of_stream(stream)];
  for (uint64_t known = seen.load(); known < index && !seen.compare_exchange_weak(known, index);) {
  }
}

void LogWriter::note_all_passed(uint64_t index) {
  for (uint64_t place = 0; place < kStreams; place++) note_passed(index, 2 * place);
}

uint64_t LogWriter::passed_records(uint64_t stream) {
  const WorkerPage p = page();
  const uint64_t place = place_of_stream(stream);
  note_passed(std::max(p.server().passed_index.load(std::memory_order_acquire),
                       p.server().passed_of_stream[place].load(std::memory_order_acquire)),
              stream);
  return seen_[place].load();
}

bool LogWriter::has_passed(uint64_t index, uint64_t stream) {
  const WorkerPage p = page();
  const bool passed = passed_records(stream) >= index;
  const std::unique_lock<std::mutex> alone(call_mutex_, std::try_to_lock);
  if (!alone.owns_lock()) return passed;  // whoever waits has the server look
  p.worker().awaited_index.store(passed ? 0 : index);
  if (!passed) wake_server(Kind::kSynchronize);
  return passed;
}

bool LogWriter::wait_until_passed(uint64_t index, uint64_t stream, uint64_t patience_ns) {
  const WorkerPage p = page();
  const auto passed = [&] { return passed_records(stream) >= index; };
  if (passed()) return true;
  const std::lock_guard<std::mutex> one_at_a_time(call_mutex_);
  p.worker().awaited_index.store(index);
  waits_.fetch_add(1, std::memory_order_relaxed);
  wake_server(Kind::kSynchronize);
  bool over = arrives_soon(passed);
  // As long as the device gets on, so does the wait.
  uint64_t seen_passed = passed_records(stream), until = now_ns() + 10 * patience_ns, given_until = until;
  // The server's look at what is awaited may come just before it is written: the first sleeps are short.
  for (long sleep_ms = 1;
       !over && p.shared().session_state.load() != kLost && now_ns() < std::min(until, given_until);
       sleep_ms = std::min(2 * sleep_ms, kLivenessMilliseconds)) {
    if (const uint64_t now_passed = passed_records(stream);
        std::exchange(seen_passed, now_passed) != now_passed)
      given_until = until = now_ns() + 10 * patience_ns;
    if (p.server().cursor_index.load() < index)
      given_until = until;
    else if (given_until == until)
      given_until = now_ns() + patience_ns;
    const uint32_t seen = p.shared().reply_futex.load();
    p.shared().worker_sleeping.store(1);
    if (!(over = passed())) futex_wait(p.shared().reply_futex, seen, sleep_ms);
    p.shared().worker_sleeping.store(0);
    over = passed();
  }
  p.worker().awaited_index.store(0);
  return over;
}

void LogWriter::wait_for_reply(uint64_t sequence) {
  const WorkerPage p = page();
  const auto arrived = [&] { return p.server().reply_sequence.load(std::memory_order_acquire) >= sequence; };
  waits_.fetch_add(1, std::memory_order_relaxed);
  if (arrives_soon(arrived)) return;
  uint64_t proxyd_gone_since_ns = 0;
  while (!arrived()) {
    const uint32_t seen = p.shared().reply_futex.load();
    p.shared().worker_sleeping.store(1);
    if (!arrived()) {
      // An asynchronous error needs no look here: the server answers every sync record, with that error if
      // need be.
      if (p.shared().session_state.load() == kLost) {
        p.shared().worker_sleeping.store(0);
        raise();
      }
      futex_wait(p.shared().reply_futex, seen, kLivenessMilliseconds);
      if (!arrived()) check_proxyd(proxyd_gone_since_ns);
    }
    p.shared().worker_sleeping.store(0);
  }
}

// Device servers go on without proxyd, and a successor may come: only who waits for too long gives up.
// `gone_since_ns` is the caller's, 0 when its wait begins.
void LogWriter::check_proxyd(uint64_t& gone_since_ns) const {
  const WorkerPage p = page();
  const int32_t pid = p.daemon().proxyd_pid.load();
  if (runtime_.empty() ? process_is_alive(pid, p.daemon().proxyd_start_ticks.load())
                       : directory_is_locked(runtime_)) {
    gone_since_ns = 0;
    return;
  }
  const uint64_t now = now_ns();
  if (gone_since_ns == 0) gone_since_ns = now;
  if (now - gone_since_ns < p.fixed().proxyd_grace_s * 1'000'000'000ull) return;
  throw RemoteError(ErrorKind::kLost,
                    "proxyd (pid " + std::to_string(pid) + ") is gone, and no other has come in " +
                        std::to_string(p.fixed().proxyd_grace_s) + " s; the device session of rank " +
                        std::to_string(p.fixed().rank) + " cannot go on");
}

void LogWriter::raise() const {
  const WorkerPage p = page();
  if (p.server().error_kind.load(std::memory_order_acquire) == 0) {
    const std::string message = text_of(p.shared().lost_message);
    throw RemoteError(ErrorKind::kLost, message.empty() ? "the device session was ended by proxyd" : message);
  }
  const auto kind = static_cast<ErrorKind>(p.server().error_kind.load(std::memory_order_acquire));
  const std::string where = text_of(p.server().error_operator);
  const std::string what = text_of(p.server().error_message);
  throw RemoteError(
      kind, what + " [device call " + where + ", record " + std::to_string(p.server().error_index) + "]");
}

void LogWriter::close() {
  if (!usable()) return;
  std::lock_guard<std::mutex> one_at_a_time(call_mutex_);
  try {
    exchange(Kind::kEnd, 0, 0, [](uint64_t*) {}, [](const uint8_t*, size_t) {});
  } catch (...) {
    usable_.store(false);
    throw;
  }
  usable_.store(false);
  raise_if_failed();
}

}  // namespace understudy::replay
