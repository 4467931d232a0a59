// Streams and events of the simulated device: each stream is a thread that does one thing after the other.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace understudy::simulated {

class Stream {
 public:
  using Item = std::function<void()>;
  // Answers its number, from 1. An item that throws leaves an error that sticks to the device.
  uint64_t enqueue(Item item) { return enqueue({std::move(item), false}); }
  // The same of an operator's kernel: it is counted how many of those overlap.
  uint64_t enqueue_kernel(Item item) { return enqueue({std::move(item), true}); }
  void wait(uint64_t number);
  bool passed(uint64_t number);
  uint64_t newest();

 private:
  struct Queued {
    Item item;
    bool is_kernel;
  };
  uint64_t enqueue(Queued queued);
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> items_;
  uint64_t enqueued_ = 0, done_ = 0;
  bool started_ = false;
};

// A point of a stream. It is copied into what waits for it.
struct Event {
  Stream* stream = nullptr;
  uint64_t number = 0;
};

inline constexpr int kPoolStreams = 32;
inline constexpr int kStreams =
    1 + kPoolStreams + 64;  // of a device: the default one, PyTorch's pool, and NCCL's

// Stream `id` of a device; they last as long as the process.
Stream& stream(int device, int64_t id);
// Waits for all that has been enqueued there.
void synchronize_device(int device);

}  // namespace understudy::simulated
