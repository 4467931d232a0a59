#include "recovery/persistence/csrc/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace understudy::persistence {
namespace {

// What the threads of one snapshot share.
struct Job {
  Storage& storage;
  ChunkPool& pool;
  const Source& source;
  const uint64_t offset, bytes, chunk_bytes;
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

  void run() {
    try {
      write_chunks();
      while (!under_way_.empty()) finish_one();
    } catch (...) {
      job_.fail(std::current_exception());
      end_all_writes();
    }
    const std::lock_guard lock(job_.mutex);
    job_.stalled = std::max(job_.stalled, stalled_);
  }

 private:
  void write_chunks() {
    while (!job_.cancelled.load(std::memory_order_relaxed)) {
      const uint64_t number = job_.next.fetch_add(1, std::memory_order_relaxed);
      if (number >= job_.digests.size()) return;
      const uint64_t begin = number * job_.chunk_bytes;
      const uint64_t bytes = std::min(job_.chunk_bytes, job_.bytes - begin);
      const uint64_t padded = rounded_up(bytes, kBlock);
      const uint32_t chunk = take();
      uint8_t* const memory = job_.pool.memory(chunk);
      under_way_.push_back(chunk);  // from here on it is given back, whatever happens
      job_.source.copy(begin, memory, bytes);
      job_.digests[number] = replay::digest(memory, bytes);
      std::memset(memory + bytes, 0, padded - bytes);
      writer_->submit(job_.offset + begin, memory, padded, chunk);
      submitted_++;
    }
  }

  // A chunk to fill.  Waits for others only while it holds none itself.
  uint32_t take() {
    while (!under_way_.empty()) {
      if (under_way_.size() < std::max(writer_->depth(), 1u))
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
    const auto at = std::find(under_way_.begin(), under_way_.end(), chunk);
    if (at == under_way_.end())
      throw StorageError(EPROTO, job_.storage.name() + ": a write ended that never began");
    *at = under_way_.back();
    under_way_.pop_back();
    job_.pool.give_back(chunk);
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
    for (const uint32_t chunk : under_way_) job_.pool.give_back(chunk);
    under_way_.clear();
  }

  Job& job_;
  std::unique_ptr<Writer>& writer_;
  std::vector<uint32_t> under_way_;  // chunks
  size_t submitted_ = 0;
  double stalled_ = 0;
};

}  // namespace

Written write_payload(Storage& storage, std::unique_ptr<Writer>& own, ChunkPool& pool, const Source& source,
                      uint64_t offset, uint64_t chunk_bytes, uint32_t threads) {
  const uint64_t bytes = source.bytes();
  Job job{
      storage, pool, source, offset, bytes, chunk_bytes, std::vector<uint64_t>(parts_of(bytes, chunk_bytes))};
  {
    std::vector<std::jthread> others;
    const uint64_t useful = std::min<uint64_t>(threads, job.digests.size());
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
          Worker(job, writer).run();
        });
      } catch (const std::system_error&) {
        break;  // no more threads to be had: those that run write it all
      }
    }
    Worker(job, own).run();
  }
  if (job.failure) std::rethrow_exception(job.failure);
  return {std::move(job.digests), job.stalled};
}

}  // namespace understudy::persistence
