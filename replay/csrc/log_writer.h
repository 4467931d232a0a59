// The worker's end of the log: many threads append, none waits unless it needs a value back.
#pragma once
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "replay/csrc/futex.h"
#include "replay/csrc/log_map.h"
#include "replay/csrc/quick_lock.h"

namespace understudy::replay {

// What the device server (or proxyd, on its behalf) answered instead of a value.
struct RemoteError : std::runtime_error {
  RemoteError(ErrorKind k, const std::string& message) : std::runtime_error(message), kind(k) {}
  ErrorKind kind;
};

class LogWriter {
 public:
  static constexpr uint32_t kLost = static_cast<uint32_t>(SessionState::kLost);
  static constexpr size_t kMaxBodyBytes = 1 << 20;  // of the caller's part of one record
  static constexpr size_t kMaxFrees = 16384;        // piggybacked on one record

  explicit LogWriter(const std::string& directory);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // False in a forked child and after close().
  bool usable() const { return usable_.load(std::memory_order_relaxed); }
  ControlPage& page() const { return map_.page(); }
  uint64_t records() const { return next_index_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return offset_.load(std::memory_order_relaxed); }
  uint64_t wakes() const { return wakes_.load(std::memory_order_relaxed); }
  uint64_t waits() const { return waits_.load(std::memory_order_relaxed); }

  // Appends one record; `fill(uint64_t* body)` writes `words` words in place. Any thread. Returns the
  // record's index.
  template <class Fill>
  uint64_t append(Kind kind, uint64_t aux, size_t words, Fill&& fill) {
    uint64_t index;
    {
      std::lock_guard<QuickLock> lock(lock_);
      index = write(kind, aux, words, std::forward<Fill>(fill));
    }
    if (__builtin_expect(page().server_sleeping.load(std::memory_order_seq_cst) != 0, 0)) wake_server(kind);
    return index;
  }

  // Appends a sync record and waits for its reply: `read(const uint8_t* payload, size_t bytes)` sees it in
  // place. Throws RemoteError if the call failed, the program failed earlier, or the session is lost.
  template <class Fill, class Read>
  void call(Kind kind, uint64_t aux, size_t words, Fill&& fill, Read&& read) {
    std::lock_guard<std::mutex> one_at_a_time(call_mutex_);
    raise_if_failed();
    exchange(kind, aux, words, std::forward<Fill>(fill), std::forward<Read>(read));
  }
  // The handle will be freed by the next record. Any thread; never waits for the server.
  void free_later(uint64_t handle);

  // Stores a template in the dictionary; returns its offset, which operator records carry as `aux`.
  uint64_t put_template(std::string_view name, const uint64_t* key, size_t key_words, const uint64_t* outputs,
                        size_t output_words);

  // Throws if the program failed asynchronously or the session is lost. Two relaxed loads otherwise.
  void raise_if_failed() const {
    const ControlPage& p = page();
    if (__builtin_expect(p.error_kind.load(std::memory_order_relaxed) != 0 ||
                             p.session_state.load(std::memory_order_relaxed) == kLost,
                         0))
      raise();
  }

  // Ends the session in good order. Throws RemoteError if an asynchronous error was still unseen.
  void close();

 private:
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
    std::vector<uint64_t>& frees = take_frees();
    const uint64_t bytes = sizeof(Record) + 8 * (frees.size() + words);
    const uint64_t offset = make_room(bytes);
    auto* record = reinterpret_cast<Record*>(segment_ + (offset - segment_begin_));
    record->bytes = static_cast<uint32_t>(bytes);
    record->kind = static_cast<uint16_t>(kind);
    record->frees = static_cast<uint16_t>(frees.size());
    record->aux = aux;
    if (!frees.empty()) std::memcpy(record->body(), frees.data(), 8 * frees.size());
    fill(record->body() + frees.size());
    frees.clear();
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
    ControlPage& p = page();
    p.tail_index.store(index + 1, std::memory_order_relaxed);
    p.tail.store(tail, std::memory_order_seq_cst);  // pairs with the look at server_sleeping in append()
    return index;
  }
  void collect_frees();
  uint64_t make_room_elsewhere(uint64_t bytes);
  void begin_segment();
  void reclaim_segments();
  void wait_for_segment();
  void wake_server(Kind kind);
  void wait_for_reply(uint64_t sequence);
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

  QuickLock free_lock_;  // innermost: never held while appending
  std::vector<uint64_t> pending_frees_;
  std::atomic<size_t> pending_free_count_{0};

  std::mutex call_mutex_;  // outermost
  uint64_t call_sequence_ = 0;
  uint64_t spin_ns_ = 0;     // 0: cores are scarce
  uint64_t wake_bytes_ = 0;  // less than this does not wake the server
  std::mutex dictionary_mutex_;
  uint64_t dictionary_reserved_ = 0;
  std::atomic<uint64_t> wakes_{0}, waits_{0};
};

}  // namespace understudy::replay
