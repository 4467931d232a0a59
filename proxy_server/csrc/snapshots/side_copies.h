// Copies of what lies on a GPU, beside what it computes: on a stream of their own, through pinned memory.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <mutex>

namespace understudy::server {

class SideCopies {
 public:
  // On `beside`. What is copied is as the calling thread's current stream leaves it, and does not change
  // before it is.
  SideCopies(c10::Stream beside, uint64_t most_bytes);

  // Waits for that alone, whatever else the GPU still has to do. Any thread. Throws c10::Error.
  void copy(const void* from, uint64_t bytes, void* to);

 private:
  const uint64_t most_bytes_;
  std::mutex mutex_;
  c10::Stream stream_;
  c10::Event copied_;
  c10::DataPtr staged_;
};

}  // namespace understudy::server
