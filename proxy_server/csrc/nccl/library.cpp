#include "proxy_server/csrc/nccl/library.h"

#include <dlfcn.h>

namespace understudy::server::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kOldest = 21801;
constexpr const char* kInstead =
    "; install the CUDA build of PyTorch, which brings one, or leave out --collectives own";

template <class Function>
void find_optional(void* from, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(from, name));
}

template <class Function>
void find(void* from, Function*& function, const char* name) {
  find_optional(from, function, name);
  if (function == nullptr)
    throw LibraryError(std::string(kName) + " has no " + name + ", and so is not NCCL " +
                       version_text(kOldest) + " or newer" + kInstead);
}

// The one that PyTorch uses comes first, wherever it lies.
void* opened() {
  if (void* const loaded = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (void* const found = dlopen(kName, RTLD_NOW)) return found;
  throw LibraryError(std::string("NCCL cannot be loaded (") + dlerror() + ")" + kInstead);
}

Library load() {
  void* const from = opened();
  Library all;
  find(from, all.get_version, "ncclGetVersion");
  if (all.get_version(&all.version) != Result::kSuccess || all.version < kOldest)
    throw LibraryError(std::string(kName) + " is NCCL " + version_text(all.version) + ", and " +
                       version_text(kOldest) + " or newer is needed" + kInstead);
  find(from, all.get_unique_id, "ncclGetUniqueId");
  find(from, all.init_rank_config, "ncclCommInitRankConfig");
  find(from, all.get_async_error, "ncclCommGetAsyncError");
  find(from, all.destroy, "ncclCommDestroy");
  find(from, all.abort, "ncclCommAbort");
  find_optional(from, all.revoke, "ncclCommRevoke");
  find(from, all.get_error_string, "ncclGetErrorString");
  find(from, all.get_last_error, "ncclGetLastError");
  find(from, all.group_start, "ncclGroupStart");
  find(from, all.group_end, "ncclGroupEnd");
  find(from, all.all_reduce, "ncclAllReduce");
  find(from, all.broadcast, "ncclBroadcast");
  find(from, all.reduce, "ncclReduce");
  find(from, all.all_gather, "ncclAllGather");
  find(from, all.reduce_scatter, "ncclReduceScatter");
  find(from, all.send, "ncclSend");
  find(from, all.receive, "ncclRecv");
  return all;
}

}  // namespace

void check(const Library& nccl, Result result) {
  if (result != Result::kSuccess && result != Result::kInProgress)
    throw std::runtime_error(std::string("NCCL: ") + nccl.get_error_string(result));
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const Library& library() {
  static const Library only = load();
  return only;
}

}  // namespace understudy::server::nccl
