#include "recovery/snapshots/csrc/writing/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "recovery/snapshots/csrc/storage/stream_copy.h"

namespace understudy::persistence {
namespace {

// A chunk is filled in steps that stay in the nearest caches between the copy and the digest, and goes to the
// storage in pieces, so that this begins long before the chunk is full.
constexpr uint64_t kStep = 128 << 10;
constexpr uint64_t kPiece = 1 << 20;
// What is written from where it lies: requests of this size are as fast as a disk gets.
constexpr uint64_t kInPlace = 4 << 20;

// What the threads of one snapshot share.
struct Job {
  Storage& storage;
  ChunkPool& pool;
  const Payload& payload;
  const uint64_t bytes, chunks;
  std::vector<uint64_t> digests;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> cancelled{false};
  std::mutex mutex{};
  std::exception_ptr failure{};  // the first one
  double stalled = 0;

  void fail(std::exception_ptr why) {
    cancelled.store(true, std::memory_order_relaxed);
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::move(why);
  }
};

class Worker {
 public:
  Worker(Job& job, std::unique_ptr<Writer>& writer) : job_(job), writer_(writer) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void run(const std::vector<Block>& also) {
    try {
      for (const Block& block : also) submit(block.offset, block.data, block.bytes, kNone);
      write_chunks();
      while (submitted_ != 0) finish_one();
    } catch (...) {
      job_.fail(std::current_exception());
      end_all_writes();
    }
    const std::lock_guard lock(job_.mutex);
    job_.stalled = std::max(job_.stalled, stalled_);
  }

 private:
  // A chunk of the pool that is being filled or written.
  struct Held {
    uint32_t chunk;
    uint32_t pieces;  // under way
  };

  void write_chunks() {
    while (!job_.cancelled.load(std::memory_order_relaxed)) {
      const uint64_t number = job_.next.fetch_add(1, std::memory_order_relaxed);
      if (number >= job_.chunks) return;
      const uint64_t begin = number * job_.payload.chunk_bytes;
      const uint64_t end = std::min(begin + job_.payload.chunk_bytes, job_.bytes);
      if (job_.payload.digests) {
        replay::StreamedDigest digest;
        copy(begin, end, begin, &digest);
        job_.digests[number] = digest.value();
      } else {
        write_chunk(begin, end);
      }
      if (filling_ != kNone) give_back_if_written(std::exchange(filling_, kNone));
    }
  }

  void write_chunk(uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end;) {
      const Source::Span span = job_.payload.source.span(at);
      const uint64_t until = std::min(end, at + span.bytes);
      if (span.in_place == nullptr) {
        copy(at, until, begin, nullptr);
      } else {
        for (uint64_t from = at; from < until; from += std::min(kInPlace, until - from))
          submit(job_.payload.offset + from, span.in_place + (from - at), std::min(kInPlace, until - from),
                 kNone);
      }
      at = until;
    }
  }

  // From `at` to `end` of the chunk that begins at `begin`, through a chunk of the pool.  Pieces of it may be
  // under way afterwards.  Precondition: `at` is a multiple of kBlock.
  void copy(uint64_t at, uint64_t end, uint64_t begin, replay::StreamedDigest* digest) {
    if (filling_ == kNone) {
      const uint32_t chunk = take();
      held_.push_back({chunk, 0});  // from here on it is given back, whatever happens
      filling_ = chunk;
    }
    uint8_t* const memory = job_.pool.memory(filling_);
    uint64_t submitted = at;
    while (at < end) {
      const uint64_t step = std::min(kStep, end - at);
      job_.payload.source.copy(at, memory + (at - begin), step, digest);
      at += step;
      if (at < end && at - submitted < kPiece) continue;
      const uint64_t padded = rounded_up(at, kBlock);
      std::memset(memory + (at - begin), 0, padded - at);
      if (can_stream(Stream::kSse2)) fence_stores();
      submit(job_.payload.offset + submitted, memory + (submitted - begin), padded - submitted, filling_);
      of(filling_)->pieces++;
      submitted = padded;
    }
  }

  void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint32_t token) {
    while (submitted_ >= std::max(writer_->depth(), 1u)) finish_one();
    writer_->submit(offset, data, bytes, token);
    submitted_++;
  }

  // A chunk to fill.  Waits for others only while it holds none itself.
  uint32_t take() {
    while (!held_.empty()) {  // all of them filled: each ends with its last piece
      if (const auto chunk = job_.pool.try_take()) return *chunk;
      finish_one();
    }
    if (const auto chunk = job_.pool.try_take()) return *chunk;
    const uint64_t begin = replay::now_ns();
    const uint32_t chunk = job_.pool.take();
    stalled_ += static_cast<double>(replay::now_ns() - begin) * 1e-9;
    return chunk;
  }

  void finish_one() {
    submitted_--;  // whether it ends well or not
    const auto chunk = static_cast<uint32_t>(writer_->wait());
    if (chunk == kNone) return;
    const auto at = of(chunk);
    if (at == held_.end() || at->pieces == 0)
      throw StorageError(EPROTO, job_.storage.name() + ": a write ended that never began");
    at->pieces--;
    if (chunk != filling_) give_back_if_written(chunk);
  }

  // After an error, whichever: what was submitted may still be read from memory and be written to the slot,
  // until wait() has answered, or at the latest until the writer is gone.
  void end_all_writes() {
    for (; submitted_ != 0; submitted_--) {
      try {
        writer_->wait();
      } catch (const std::exception&) {  // the first failure is what counts
      }
    }
    writer_.reset();
    for (const Held& held : held_) job_.pool.give_back(held.chunk);
    held_.clear();
  }

  std::vector<Held>::iterator of(uint32_t chunk) {
    return std::find_if(held_.begin(), held_.end(), [chunk](const Held& h) { return h.chunk == chunk; });
  }

  // Precondition: it is filled.
  void give_back_if_written(uint32_t chunk) {
    const auto at = of(chunk);
    if (at->pieces != 0) return;
    *at = held_.back();
    held_.pop_back();
    job_.pool.give_back(chunk);
  }

  Job& job_;
  std::unique_ptr<Writer>& writer_;
  static constexpr uint32_t kNone = UINT32_MAX;
  std::vector<Held> held_;
  uint32_t filling_ = kNone;  // stays held though none of its pieces is under way
  size_t submitted_ = 0;      // pieces
  double stalled_ = 0;
};

// What is written from where it lies takes a thread no time, if it may have several requests under way.
uint64_t threads_for(const Payload& payload, const Writer& writer, uint64_t threads) {
  if (payload.digests || writer.depth() == 1) return threads;
  uint64_t copied = 0;
  for (uint64_t at = 0; at < payload.source.bytes();) {
    const Source::Span span = payload.source.span(at);
    if (span.in_place == nullptr) copied += span.bytes;
    at += span.bytes;
  }
  return std::min(threads, std::max<uint64_t>(parts_of(copied, payload.chunk_bytes), 1));
}

}  // namespace

Written write_payload(Storage& storage, std::unique_ptr<Writer>& own, ChunkPool& pool, const Payload& payload,
                      uint32_t threads) {
  const uint64_t bytes = payload.source.bytes(), chunks = parts_of(bytes, payload.chunk_bytes);
  Job job{storage, pool, payload, bytes, chunks, std::vector<uint64_t>(payload.digests ? chunks : 0)};
  {
    std::vector<std::jthread> others;
    const uint64_t useful = std::min(threads_for(payload, *own, threads), job.chunks);
    for (uint64_t i = 1; i < useful; i++) {
      try {
        others.emplace_back([&job] {
          std::unique_ptr<Writer> writer;
          try {
            writer = job.storage.writer();
          } catch (...) {
            job.fail(std::current_exception());
            return;
          }
          Worker(job, writer).run({});
        });
      } catch (const std::system_error&) {
        break;  // no more threads to be had: those that run write it all
      }
    }
    Worker(job, own).run(payload.also);
  }
  if (job.failure) std::rethrow_exception(job.failure);
  return {std::move(job.digests), job.stalled};
}

}  // namespace understudy::persistence
