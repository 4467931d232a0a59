// The worker's end of the log: many threads append, none waits unless it needs a value back.
#pragma once
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/log_map.h"
#include "replay/csrc/log/quick_lock.h"

namespace understudy::replay {

// What the device server (or proxyd, on its behalf) answered instead of a value.
struct RemoteError : std::runtime_error {
  RemoteError(ErrorKind k, const std::string& message) : std::runtime_error(message), kind(k) {}
  ErrorKind kind;
};

// An operator record names a template that no new record may name any more.
struct RetiredTemplate : LogError {
  RetiredTemplate() : LogError("the template of this call was retired: it must be stored again") {}
};

class LogWriter {
 public:
  static constexpr uint32_t kLost = static_cast<uint32_t>(SessionState::kLost);
  static constexpr size_t kMaxBodyBytes = 1 << 20;    // of the caller's part of one record
  static constexpr size_t kMaxFrees = 16384;          // piggybacked on one record
  static constexpr long kLivenessMilliseconds = 500;  // how often a waiting worker looks for proxyd
  static constexpr uint64_t kNamedRegions = kTemplateRegions / 2;  // whose templates new records may name

  explicit LogWriter(const std::string& directory);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // False in a forked child and after close().
  bool usable() const { return usable_.load(std::memory_order_relaxed); }
  WorkerPage page() const { return map_.worker_page(); }
  uint64_t records() const { return next_index_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return offset_.load(std::memory_order_relaxed); }
  uint64_t wakes() const { return wakes_.load(std::memory_order_relaxed); }
  uint64_t waits() const { return waits_.load(std::memory_order_relaxed); }

  // Appends one record; `fill(uint64_t* body)` writes `words` words in place. Any thread. Returns the
  // record's index. Throws RetiredTemplate, and so does call().
  template <class Fill>
  uint64_t append(Kind kind, uint64_t aux, size_t words, Fill&& fill) {
    uint64_t index;
    {
      std::lock_guard<QuickLock> lock(lock_);
      index = write(kind, aux, words, std::forward<Fill>(fill));
    }
    if (__builtin_expect(page().shared().server_sleeping.load(std::memory_order_seq_cst) != 0, 0))
      wake_server(kind);
    return index;
  }

  // Several records with none of other threads between them. There is room for all before the first is
  // written, unless they are many: the server, which does not stand still among them, waits for no other.
  void append_together(Kind kind, uint64_t aux, const std::vector<std::vector<uint64_t>>& bodies);

  // Appends a sync record and waits for its reply: `read(const uint8_t* payload, size_t bytes)` sees it in
  // place. Throws RemoteError if the call failed, the program failed earlier, or the session is lost.
  template <class Fill, class Read>
  void call(Kind kind, uint64_t aux, size_t words, Fill&& fill, Read&& read) {
    std::lock_guard<std::mutex> one_at_a_time(call_mutex_);
    raise_if_failed();
    exchange(kind, aux, words, std::forward<Fill>(fill), std::forward<Read>(read));
  }
  // Waits until the device has done all records of `stream` before `index`, and for nothing behind them.
  // False if it has not `patience_ns` after it was given them, or at all within ten times that, or the
  // session is lost: then whoever asks the server itself learns why.
  bool wait_until_passed(uint64_t index, uint64_t stream, uint64_t patience_ns);
  // Whether it has done them. Has the server find out, if nobody else waits for anything: who asks again
  // learns of it.
  bool has_passed(uint64_t index, uint64_t stream);

  // It has done them, and for good: whichever server does them again, the script has seen that.
  void note_passed(uint64_t index, uint64_t stream);
  void note_all_passed(uint64_t index);

  // From here on records say on which stream they lie: `of_thread` answers that of the calling thread.
  void use_streams(uint64_t (*of_thread)());
  // The index behind the last record that concerns `stream`; while there is one stream, behind the last.
  uint64_t end_of_stream(uint64_t stream) const {
    return stream_of_thread_.load(std::memory_order_relaxed) == nullptr
               ? next_index_.load(std::memory_order_relaxed)
               : ends_[place_of_stream(stream)].load(std::memory_order_relaxed);
  }
  // The handle will be freed by the next record. Any thread; never waits for the server.
  void free_later(uint64_t handle);

  // Stores a template in the dictionary; returns its id, which operator records carry as `aux` until it is
  // retired. Waits where the log still needs what the dictionary is full of.
  uint64_t put_template(std::string_view name, const uint64_t* key, size_t key_words, const uint64_t* outputs,
                        size_t output_words);

  // Throws if the program failed asynchronously or the session is lost. Two relaxed loads otherwise.
  void raise_if_failed() const {
    const WorkerPage p = page();
    if (__builtin_expect(p.server().error_kind.load(std::memory_order_relaxed) != 0 ||
                             p.shared().session_state.load(std::memory_order_relaxed) == kLost,
                         0))
      raise();
  }

  // Ends the session in good order. Throws RemoteError if an asynchronous error was still unseen.
  void close();

 private:
  uint64_t passed_records(uint64_t stream);
  template <class Fill, class Read>
  void exchange(Kind kind, uint64_t aux, size_t words, Fill&& fill, Read&& read) {
    const uint64_t sequence = ++call_sequence_;
    append(kind, aux, words + 2, [&](uint64_t* body) {
      body[0] = sequence;
      body[1] = 0;
      fill(body + 2);
    });
    wait_for_reply(sequence);
    const auto* header = reinterpret_cast<const ReplyHeader*>(map_.reply());
    const uint8_t* payload = map_.reply() + sizeof(ReplyHeader);
    const size_t bytes = header->bytes <= map_.reply_bytes() - sizeof(ReplyHeader) ? header->bytes : 0;
    if (header->error_kind != 0)
      throw RemoteError(static_cast<ErrorKind>(header->error_kind),
                        std::string(reinterpret_cast<const char*>(payload), bytes));
    read(payload, bytes);
  }

  template <class Fill>
  uint64_t write(Kind kind, uint64_t aux, size_t words, Fill&& fill) {
    if (!usable()) throw LogError("this process has no device session (closed, or a forked child)");
    if (is_operator(kind) && __builtin_expect(aux < oldest_template_, 0)) raise_retired();
    if (__builtin_expect(stream_of_thread_.load(std::memory_order_relaxed) != nullptr, 0) &&
        is_enqueued(kind))
      enter_stream();
    std::vector<uint64_t>& frees = take_frees();
    const uint64_t bytes = sizeof(Record) + 8 * (frees.size() + words);
    const uint64_t offset = make_room(bytes);
    auto* record = reinterpret_cast<Record*>(segment_ + (offset - segment_begin_));
    record->bytes = static_cast<uint32_t>(bytes);
    record->kind = static_cast<uint16_t>(kind);
    record->frees = static_cast<uint16_t>(frees.size());
    record->aux = aux;
    if (!frees.empty()) std::memcpy(record->body(), frees.data(), 8 * frees.size());
    uint64_t* const body = record->body() + frees.size();
    fill(body);
    frees.clear();
    if (__builtin_expect(stream_of_thread_.load(std::memory_order_relaxed) != nullptr, 0))
      count_for_stream(kind, words == 0 ? 0 : *body);
    return publish(record, offset + bytes);
  }
  std::vector<uint64_t>& take_frees() {
    if (pending_free_count_.load(std::memory_order_relaxed) != 0) collect_frees();
    return taken_frees_;
  }
  // The offset of a record of `bytes` bytes, all of it in the current segment.
  uint64_t make_room(uint64_t bytes) {
    const uint64_t offset = offset_.load(std::memory_order_relaxed);
    if (__builtin_expect(offset + bytes <= segment_end_, 1)) return offset;
    return make_room_elsewhere(bytes);
  }
  uint64_t publish(Record* record, uint64_t tail) {
    // Less room than a header at the end of a segment becomes part of the last record.
    if (const uint64_t rest = segment_end_ - tail; __builtin_expect(rest < sizeof(Record), 0)) {
      record->bytes += static_cast<uint32_t>(rest);
      tail += rest;
    }
    const uint64_t index = next_index_.load(std::memory_order_relaxed);
    record->index = index;
    next_index_.store(index + 1, std::memory_order_relaxed);
    offset_.store(tail, std::memory_order_relaxed);
    const WorkerPage p = page();
    p.worker().tail_index.store(index + 1, std::memory_order_relaxed);
    // Pairs with the look at server_sleeping in append().
    p.worker().tail.store(tail, std::memory_order_seq_cst);
    return index;
  }
  void enter_stream();
  void count_for_stream(Kind kind, uint64_t first_word);
  void collect_frees();
  uint64_t make_room_elsewhere(uint64_t bytes);
  void fill_segment();
  void begin_segment();
  void reclaim_segments();
  // Until `ready()`: the server lets go of what it can meanwhile.
  template <class Ready>
  void wait_for_room(Ready&& ready);
  uint64_t open_region();
  void retire_region(uint64_t number);
  void release_regions();
  [[noreturn]] static void raise_retired();
  void wake_server(Kind kind);
  void wait_for_reply(uint64_t sequence);
  template <class Arrived>
  bool arrives_soon(const Arrived& arrived) const;
  void check_proxyd(uint64_t& gone_since_ns) const;
  [[noreturn]] void raise() const;

  LogMap map_;
  std::atomic<bool> usable_{true};
  QuickLock lock_;  // of everything below, and of the order of records
  std::atomic<uint64_t> offset_{0}, next_index_{0};
  uint8_t* segment_ = nullptr;                    // where the current segment lies
  uint64_t segment_begin_ = 0, segment_end_ = 0;  // log offsets of it
  uint64_t next_segment_ = 0;                     // logical number of the segment after the current one
  uint64_t reclaimed_segments_ = 0;
  uint32_t untouched_segment_ = 0;  // physical segments from here on were never used
  std::vector<uint32_t> free_segments_;
  std::vector<uint64_t> taken_frees_;
  uint64_t oldest_template_ = 0;  // templates of smaller ids are retired
  std::atomic<uint64_t (*)()> stream_of_thread_{nullptr};
  uint64_t stream_ = 0;  // of the records
  std::array<std::atomic<uint64_t>, kStreams> ends_{};
  std::array<std::atomic<uint64_t>, kStreams> seen_{};  // records that the device has passed

  QuickLock free_lock_;  // innermost: never held while appending
  std::vector<uint64_t> pending_frees_;
  std::atomic<size_t> pending_free_count_{0};

  std::mutex call_mutex_;  // outermost
  uint64_t call_sequence_ = 0;
  std::string runtime_;      // proxyd's directory, where proxyd's pid cannot be seen from here; else empty
  uint64_t spin_ns_ = 0;     // 0: cores are scarce
  uint64_t wake_bytes_ = 0;  // less than this does not wake the server
  std::mutex dictionary_mutex_;                              // of what follows; before lock_
  uint64_t region_end_ = 0;                                  // id behind the region that is being filled
  uint64_t dictionary_reserved_ = 0;                         // id up to which it has memory
  uint64_t retired_regions_ = 0, released_regions_ = 0;      // so many from the first on
  std::array<uint64_t, kTemplateRegions> retired_before_{};  // the segment from which on no record names it
  std::atomic<uint64_t> wakes_{0}, waits_{0};
};

template <class Ready>
void LogWriter::wait_for_room(Ready&& ready) {
  if (ready()) return;
  const WorkerPage p = page();
  struct Pressure {
    std::atomic<uint32_t>& threads;
    explicit Pressure(std::atomic<uint32_t>& t) : threads(t) { threads.fetch_add(1); }
    ~Pressure() { threads.fetch_sub(1); }
  } const pressure(p.worker().backpressure);
  p.shared().tail_futex.fetch_add(1);
  futex_wake(p.shared().tail_futex);
  uint64_t proxyd_gone_since_ns = 0;
  for (;;) {
    const uint32_t seen = p.shared().freed_futex.load();
    if (ready()) return;
    raise_if_failed();
    check_proxyd(proxyd_gone_since_ns);
    futex_wait(p.shared().freed_futex, seen, kLivenessMilliseconds);
  }
}

}  // namespace understudy::replay
