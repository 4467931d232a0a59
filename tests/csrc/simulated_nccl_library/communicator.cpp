#include "tests/csrc/simulated_nccl_library/communicator.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/csrc/simulated_cuda/runtime.h"

namespace understudy::simulated_nccl {
namespace {

using std::chrono::milliseconds;

constexpr int kGarbage = 0xA5;
constexpr milliseconds kSpins{4}, kPauses{6}, kFirstCall{2};

// SIMULATED_NCCL_INIT_MS: connecting takes longer; SIMULATED_NCCL_HANG: so many calls from the start the one
// comes that never ends; SIMULATED_NCCL_TELLS: a peer that is gone is a remote error, and not only silent.
int number(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : 0;
}

bool hangs() {
  static std::atomic<int> calls{0};
  return ++calls == number("SIMULATED_NCCL_HANG");
}

// As NCCL's thread for what goes between hosts, it looks without a pause; here two fifths of the time.
void spin_until(const std::atomic<bool>& over) {
  using std::chrono::steady_clock;
  while (!over) {
    for (const auto until = steady_clock::now() + kSpins; !over && steady_clock::now() < until;) {
    }
    std::this_thread::sleep_for(kPauses);
  }
}

at::ScalarType element_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return at::kChar;
    case ncclInt32:
      return at::kInt;
    case ncclInt64:
      return at::kLong;
    case ncclFloat16:
      return at::kHalf;
    case ncclFloat32:
      return at::kFloat;
    case ncclFloat64:
      return at::kDouble;
    case ncclBfloat16:
      return at::kBFloat16;
    default:
      return at::kByte;
  }
}

void add(at::Tensor& sum, const at::Tensor& next, ncclRedOp_t how) {
  if (how == ncclProd)
    sum.mul_(next);
  else if (how == ncclMax)
    sum.copy_(at::maximum(sum, next));
  else if (how == ncclMin)
    sum.copy_(at::minimum(sum, next));
  else
    sum.add_(next);
}

void finish(at::Tensor& sum, int64_t size, ncclRedOp_t how) {
  if (how != ncclAvg) return;
  if (at::isIntegralType(sum.scalar_type(), true))
    sum.div_(size, "trunc");
  else
    sum.div_(size);
}

std::string name_of(const ncclUniqueId& id) {
  return {id.internal, strnlen(id.internal, sizeof id.internal)};
}

}  // namespace

size_t bytes_of(ncclDataType_t type) { return c10::elementSize(element_of(type)); }

Communicator::Communicator(int rank, int size, int device, bool blocking)
    : rank_(rank), size_(size), device_(device), blocking_(blocking), links_(rank, size) {}

Communicator::~Communicator() {
  if (other_.joinable()) other_.join();
}

void Communicator::connect(const ncclUniqueId& id) {
  other_ = std::thread([this, name = name_of(id)] {
    for (int left = number("SIMULATED_NCCL_INIT_MS"); left > 0 && !aborted_; left--)
      std::this_thread::sleep_for(milliseconds(1));
    const Outcome outcome = links_.connect(name, aborted_);
    state_ = outcome == Outcome::kDone ? ncclSuccess : ncclSystemError;
  });
  if (blocking_) other_.join();
}

ncclResult_t Communicator::state() {
  if (revoked_) return queued_ == 0 ? ncclSuccess : ncclInProgress;
  return static_cast<ncclResult_t>(state_.load());
}

at::Tensor Communicator::tensor(const void* at, const Call& call, size_t parts) const {
  return at::from_blob(const_cast<void*>(at), {static_cast<int64_t>(call.count * parts)},
                       at::dtype(element_of(call.type)));
}

bool Communicator::settle(Outcome outcome) {
  if (outcome == Outcome::kDone) return !aborted_;
  if (outcome == Outcome::kBroken) {
    if (number("SIMULATED_NCCL_TELLS") != 0) state_ = ncclRemoteError;
    spin_until(aborted_);  // its kernel goes on waiting
  }
  return false;
}

bool Communicator::run_collective(const Call& call) {
  const size_t bytes = call.count * bytes_of(call.type), size = static_cast<size_t>(size_);
  const bool here = call.peer == rank_;
  std::vector<Outgoing> out;
  std::vector<Incoming> in;
  std::vector<uint8_t> all(size * bytes);
  for (int peer = 0; peer < size_; peer++) {
    const size_t offset = static_cast<size_t>(peer) * bytes;
    switch (call.kind) {
      case Kind::kAllReduce:
      case Kind::kAllGather:
        out.push_back({peer, call.from, bytes});
        in.push_back({peer, all.data() + offset, bytes});
        break;
      case Kind::kReduceScatter:
        out.push_back({peer, call.from + offset, bytes});
        in.push_back({peer, all.data() + offset, bytes});
        break;
      case Kind::kReduce:
        if (here) in.push_back({peer, all.data() + offset, bytes});
        if (peer == call.peer) out.push_back({peer, call.from, bytes});
        break;
      case Kind::kBroadcast:
        if (here) out.push_back({peer, call.from, bytes});
        if (peer == call.peer) in.push_back({peer, all.data(), bytes});
        break;
      default:
        break;
    }
  }
  if (!settle(links_.exchange(out, in, aborted_))) return false;
  if (call.kind == Kind::kReduce && !here) return true;
  if (call.kind == Kind::kBroadcast || call.kind == Kind::kAllGather) {
    std::memcpy(call.to, all.data(), call.kind == Kind::kBroadcast ? bytes : all.size());
    return true;
  }
  at::Tensor sum = tensor(all.data(), call).clone();  // in the order of ranks
  for (size_t peer = 1; peer < size; peer++) {
    at::Tensor next = tensor(all.data() + peer * bytes, call);
    add(sum, next, call.reduction);
  }
  finish(sum, size_, call.reduction);
  tensor(call.to, call).copy_(sum);
  return true;
}

void Communicator::run(const std::vector<Call>& calls) {
  bool well = !aborted_;
  if (well && hangs()) {
    spin_until(aborted_);
    well = false;
  }
  std::vector<Outgoing> out;
  std::vector<Incoming> in;
  for (const Call& call : calls) {
    const size_t bytes = call.count * bytes_of(call.type);
    if (call.kind == Kind::kSend)
      out.push_back({call.peer, call.from, bytes});
    else if (call.kind == Kind::kReceive)
      in.push_back({call.peer, call.to, bytes});
    else
      well = well && run_collective(call);
  }
  if (well && !(out.empty() && in.empty())) well = settle(links_.exchange(out, in, aborted_));
  if (well) return;
  for (const Call& call : calls) {
    const size_t parts = call.kind == Kind::kAllGather ? static_cast<size_t>(size_) : 1;
    if (call.to != nullptr && (call.kind != Kind::kReduce || call.peer == rank_))
      std::memset(call.to, kGarbage, parts * call.count * bytes_of(call.type));
  }
}

// The first call connects more, and so one that does not block is begun by another thread.
ncclResult_t Communicator::enqueue(std::vector<Call> calls, simulated::Stream& stream) {
  for (Call& call : calls) {
    const simulated::Memory& memory = simulated::memory(device_);
    if (call.from != nullptr) call.from = static_cast<const uint8_t*>(memory.for_kernels(call.from));
    if (call.to != nullptr) call.to = static_cast<uint8_t*>(memory.for_kernels(call.to));
  }
  queued_++;
  const auto start = [self = shared_from_this(), calls = std::move(calls), &stream] {
    stream.enqueue([self, calls] {
      self->run(calls);
      self->queued_--;
    });
  };
  if (used_.exchange(true) || blocking_) {
    start();
    return ncclSuccess;
  }
  other_.join();
  state_ = ncclInProgress;
  other_ = std::thread([this, start] {
    std::this_thread::sleep_for(kFirstCall);
    start();
    state_ = ncclSuccess;
  });
  return ncclInProgress;
}

ncclResult_t Communicator::revoke() {
  if (revoked_ || state_ == ncclInProgress) return ncclInvalidArgument;
  revoked_ = aborted_ = true;
  return ncclInProgress;
}

void Communicator::abort() {
  aborted_ = true;
  if (other_.joinable()) other_.join();
}

void Communicator::wait_for_streams() const {
  while (queued_ != 0) std::this_thread::sleep_for(milliseconds(1));
}

}  // namespace understudy::simulated_nccl
