// A communicator of the stand-in, and what its streams have of it.
#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/csrc/simulated_cuda/stream.h"
#include "tests/csrc/simulated_nccl_library/links.h"
#include "tests/csrc/simulated_nccl_library/nccl.h"

namespace understudy::simulated_nccl {

enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kReceive };

// One call, as a kernel sees it.
struct Call {
  Kind kind;
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t reduction = ncclSum;
  int peer = 0;  // or root
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int size, int device, bool blocking);
  ~Communicator();

  void connect(const ncclUniqueId& id);
  ncclResult_t state();
  // What is called together: messages at the same time, collectives one after the other.
  ncclResult_t enqueue(std::vector<Call> calls, simulated::Stream& stream);
  ncclResult_t revoke();
  void abort();
  void wait_for_streams() const;

  int device() const { return device_; }
  int size() const { return size_; }
  bool revoked() const { return revoked_; }

 private:
  void run(const std::vector<Call>& calls);
  bool run_collective(const Call& call);
  bool settle(Outcome outcome);
  at::Tensor tensor(const void* at, const Call& call, size_t parts = 1) const;

  const int rank_, size_, device_;
  const bool blocking_;
  Links links_;
  std::thread other_;  // connects, and starts the first call
  std::atomic<int> state_{ncclInProgress};
  std::atomic<bool> aborted_{false}, revoked_{false}, used_{false};
  std::atomic<int> queued_{0};
};

size_t bytes_of(ncclDataType_t type);

}  // namespace understudy::simulated_nccl
