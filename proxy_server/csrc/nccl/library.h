// NCCL's functions, as the library has them that PyTorch's CUDA build has loaded. Nothing is linked with it,
// so a build without CUDA is what it was.
//
// What is declared here is the part of NCCL's public header that is used, and has been the same since 2.18.
#pragma once
#include <climits>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace understudy::server::nccl {

enum class Result : int { kSuccess = 0, kInProgress = 7 };  // all others are errors, and have a text
enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};
enum class Reduction : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4 };

using Handle = struct ncclComm*;
using DeviceStream = void*;  // a cudaStream_t

struct UniqueId {
  char bytes[128];
};

// As it was in 2.17. A later library reads as much as `size` says, and puts its defaults in place of the
// rest.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = INT_MIN;  // INT_MIN: as the library likes
  int cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
  const char* net_name = nullptr;
};
static_assert(sizeof(Config) == 40 && offsetof(Config, blocking) == 16 && offsetof(Config, net_name) == 32);

// There is no NCCL, or none that can be used; a sentence that says what to do.
struct LibraryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Library {
  int version = 0;  // as NCCL_VERSION_CODE: 22809 is 2.28.9

  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*init_rank_config)(Handle* handle, int size, UniqueId id, int rank, Config* config);
  Result (*get_async_error)(Handle handle, Result* error);
  Result (*destroy)(Handle handle);
  Result (*abort)(Handle handle);
  Result (*revoke)(Handle handle, int flags);  // none before 2.28.7
  const char* (*get_error_string)(Result result);
  const char* (*get_last_error)(Handle handle);
  Result (*group_start)();
  Result (*group_end)();

  Result (*all_reduce)(const void* from, void* to, size_t count, DataType type, Reduction reduction,
                       Handle handle, DeviceStream stream);
  Result (*broadcast)(const void* from, void* to, size_t count, DataType type, int root, Handle handle,
                      DeviceStream stream);
  Result (*reduce)(const void* from, void* to, size_t count, DataType type, Reduction reduction, int root,
                   Handle handle, DeviceStream stream);
  Result (*all_gather)(const void* from, void* to, size_t count, DataType type, Handle handle,
                       DeviceStream stream);
  Result (*reduce_scatter)(const void* from, void* to, size_t count, DataType type, Reduction reduction,
                           Handle handle, DeviceStream stream);
  Result (*send)(const void* from, size_t count, DataType type, int peer, Handle handle, DeviceStream stream);
  Result (*receive)(void* to, size_t count, DataType type, int peer, Handle handle, DeviceStream stream);
};

// Finds it once; throws LibraryError.
const Library& library();

// Throws std::runtime_error if it is an error.
void check(const Library& nccl, Result result);

// "2.28.9"
std::string version_text(int version);

}  // namespace understudy::server::nccl
