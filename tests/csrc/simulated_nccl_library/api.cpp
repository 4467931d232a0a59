// libnccl.so.2 as far as we call it. As NCCL's, its calls do not wait for what they begin, a communicator
// must be ready for the next one, and what is used after it was freed is a crash, here a loud one.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/csrc/simulated_cuda/runtime.h"
#include "tests/csrc/simulated_nccl_library/communicator.h"

namespace simulated = understudy::simulated;
using namespace understudy::simulated_nccl;

namespace {

constexpr unsigned kMagic = 0xcafebeef;

std::mutex mutex;
auto& alive() {
  static auto& all = *new std::map<ncclComm_t, std::shared_ptr<Communicator>>;
  return all;
}

std::shared_ptr<Communicator> find(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = alive().find(handle);
  if (found != alive().end()) return found->second;
  std::fprintf(stderr, "simulated NCCL: a communicator is used that is none, or none any more\n");
  std::abort();
}

std::shared_ptr<Communicator> take(ncclComm_t handle) {
  auto found = find(handle);
  const std::lock_guard<std::mutex> lock(mutex);
  alive().erase(handle);
  return found;
}

struct Queued {
  ncclComm_t handle;
  cudaStream_t stream;
  Call call;
};
thread_local int depth = 0;
thread_local std::vector<Queued> grouped;
thread_local ncclResult_t failed = ncclSuccess;

// SIMULATED_NCCL_REFUSES: what does, "revoke", a "call", or "group_end".
bool refuses(const char* what) {
  const char* const told = std::getenv("SIMULATED_NCCL_REFUSES");
  return told != nullptr && std::strcmp(told, what) == 0;
}

ncclResult_t enqueue_all() {
  const std::vector<Queued> all = std::exchange(grouped, {});
  if (const ncclResult_t problem = std::exchange(failed, ncclSuccess)) return problem;
  if (refuses("group_end")) return ncclSystemError;
  std::vector<std::pair<std::pair<ncclComm_t, cudaStream_t>, std::vector<Call>>> by_communicator;
  for (const Queued& one : all) {
    const std::pair place(one.handle, one.stream);
    if (by_communicator.empty() || by_communicator.back().first != place)
      by_communicator.push_back({place, {}});
    by_communicator.back().second.push_back(one.call);
  }
  ncclResult_t result = ncclSuccess;
  for (auto& [place, calls] : by_communicator) {
    auto& stream = *static_cast<simulated::Stream*>(place.second);
    const ncclResult_t one = find(place.first)->enqueue(std::move(calls), stream);
    if (one != ncclSuccess) result = one;
  }
  return result;
}

ncclResult_t call(ncclComm_t handle, cudaStream_t stream, const Call& one) {
  const auto communicator = find(handle);
  const ncclResult_t state = communicator->state();
  if (refuses("call") || communicator->revoked() || state != ncclSuccess || one.peer < 0 ||
      one.peer >= communicator->size()) {
    if (depth != 0) failed = ncclInvalidUsage;
    return ncclInvalidUsage;
  }
  depth++;
  grouped.push_back({handle, stream, one});
  return ncclGroupEnd();
}

// SIMULATED_NCCL_TOLD: a file, where each process tells which communicators it begins and ends.
void tell(const char* what) {
  if (const char* const file = std::getenv("SIMULATED_NCCL_TOLD"))
    std::ofstream(file, std::ios::app) << (std::string(what) + "\n") << std::flush;
}

const uint8_t* bytes(const void* at) { return static_cast<const uint8_t*>(at); }
uint8_t* bytes(void* at) { return static_cast<uint8_t*>(at); }

}  // namespace

extern "C" {

// SIMULATED_NCCL_VERSION: what it says it is.
ncclResult_t ncclGetVersion(int* version) {
  const char* const told = std::getenv("SIMULATED_NCCL_VERSION");
  *version = told != nullptr ? std::atoi(told) : 22809;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::ifstream source("/proc/sys/kernel/random/uuid");
  std::string name;
  std::getline(source, name);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* given) {
  size_t told;
  std::memcpy(&told, given, sizeof told);
  ncclConfig_t config{};
  config.blocking = 1;
  std::memcpy(static_cast<void*>(&config), given, std::min(told, sizeof config));
  if (config.magic != kMagic || config.version < 21700 || rank < 0 || rank >= size)
    return ncclInvalidArgument;
  tell("begun");
  const auto made =
      std::make_shared<Communicator>(rank, size, simulated::current_device(), config.blocking != 0);
  *handle = reinterpret_cast<ncclComm_t>(made.get());
  {
    const std::lock_guard<std::mutex> lock(mutex);
    alive()[*handle] = made;
  }
  made->connect(id);
  return config.blocking != 0 ? made->state() : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  *error = find(handle)->state();
  return ncclSuccess;
}

// Waits for what is queued.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  const auto communicator = take(handle);
  communicator->wait_for_streams();
  communicator->abort();
  tell("destroyed");
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  take(handle)->abort();
  tell("aborted");
  return ncclSuccess;
}

#ifndef WITHOUT_REVOKE
ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  return flags != 0 || refuses("revoke") || depth != 0 ? ncclInvalidArgument : find(handle)->revoke();
}
#endif

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

// SIMULATED_NCCL_LAST_ERROR: that text.
const char* ncclGetLastError(ncclComm_t) {
  const char* const told = std::getenv("SIMULATED_NCCL_LAST_ERROR");
  return told != nullptr ? told : "";
}

ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (depth == 0) return ncclInvalidUsage;
  return --depth == 0 ? enqueue_all() : ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how,
                           ncclComm_t handle, cudaStream_t stream) {
  return call(handle, stream, {Kind::kAllReduce, bytes(from), bytes(to), count, type, how});
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t handle, cudaStream_t stream) {
  return call(handle, stream, {Kind::kBroadcast, bytes(from), bytes(to), count, type, ncclSum, root});
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how,
                        int root, ncclComm_t handle, cudaStream_t stream) {
  return call(handle, stream, {Kind::kReduce, bytes(from), bytes(to), count, type, how, root});
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle,
                           cudaStream_t stream) {
  return call(handle, stream, {Kind::kAllGather, bytes(from), bytes(to), count, type});
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how,
                               ncclComm_t handle, cudaStream_t stream) {
  return call(handle, stream, {Kind::kReduceScatter, bytes(from), bytes(to), count, type, how});
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  return call(handle, stream, {Kind::kSend, bytes(from), nullptr, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  return call(handle, stream, {Kind::kReceive, nullptr, bytes(to), count, type, ncclSum, peer});
}

}  // extern "C"
