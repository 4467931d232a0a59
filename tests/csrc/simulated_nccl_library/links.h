// What goes between the members of a communicator: bytes over sockets of this host.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace understudy::simulated_nccl {

struct Outgoing {
  int peer;
  const uint8_t* at;
  size_t bytes;
};
struct Incoming {
  int peer;
  uint8_t* at;
  size_t bytes;
};

enum class Outcome { kDone, kAborted, kBroken };

class Links {
 public:
  Links(int rank, int size)
      : rank_(rank), to_(static_cast<size_t>(size), -1), from_(static_cast<size_t>(size), -1) {}
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // To all others, who do the same under that name; waits for them until it is aborted.
  Outcome connect(const std::string& name, const std::atomic<bool>& aborted);

  // All at the same time, those of one peer in their order. A message has gone when its receiver has it.
  Outcome exchange(const std::vector<Outgoing>& out, const std::vector<Incoming>& in,
                   const std::atomic<bool>& aborted);

 private:
  size_t count() const { return to_.size(); }
  int rank_;
  int listening_ = -1, asked_ = -1;
  std::vector<int> to_, from_;  // sockets, by rank: for data to it and its receipts, and the other way round
};

}  // namespace understudy::simulated_nccl
