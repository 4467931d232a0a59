#include "proxy_server/csrc/gpu/gpu_digests.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "proxy_server/csrc/gpu/gpu_code.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::server {

struct CudaDriver {
  int (*load_module)(void** module, const void* image) = nullptr;
  int (*get_function)(void** function, void* module, const char* name) = nullptr;
  int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                       void** arguments, void** more) = nullptr;
  int (*get_error_name)(int code, const char** name) = nullptr;
};

namespace {

using replay::piece::Row;

constexpr uint64_t kMostPieces = 2 << 20;  // of a launch, but for a content that has more
constexpr unsigned kThreads = 256, kMostBlocks = 4096;
constexpr uint64_t kAlignment = 256;  // of what lies in one piece of memory

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
uint64_t pieces_of(uint64_t bytes) { return (bytes + replay::kDigestPiece - 1) / replay::kDigestPiece; }

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// The process has the library by now, as PyTorch's runtime works by it.
const CudaDriver* cuda_driver() {
  static const CudaDriver* const driver = []() -> const CudaDriver* {
    static CudaDriver found;
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    const bool all = find(library, "cuModuleLoadData", found.load_module) &&
                     find(library, "cuModuleGetFunction", found.get_function) &&
                     find(library, "cuLaunchKernel", found.launch_kernel) &&
                     find(library, "cuGetErrorName", found.get_error_name);
    return all ? &found : nullptr;
  }();
  return driver;
}

std::string name_of_error(const CudaDriver& driver, int code) {
  const char* name = nullptr;
  return driver.get_error_name(code, &name) == 0 && name != nullptr ? name : std::to_string(code);
}

// The driver works in the context that is current to the calling thread, where the runtime puts PyTorch's
// with the thread's first call.
void have_context() {
  const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
  c10::Event event(at::kCUDA);
  event.record(gpu.getStream(gpu.getDevice()));
}

}  // namespace

GpuDigests::GpuDigests(const CudaDriver& driver, void* piece_digests, void* gather)
    : driver_(driver), piece_digests_(piece_digests), gather_(gather) {}

std::unique_ptr<GpuDigests> GpuDigests::load() {
  const CudaDriver* const driver = cuda_driver();
  if (gpu_code() == nullptr || driver == nullptr) return nullptr;
  have_context();
  void *module = nullptr, *piece_digests = nullptr, *gather = nullptr;
  int error = driver->load_module(&module, gpu_code());
  if (error == 0) error = driver->get_function(&piece_digests, module, "piece_digests");
  if (error == 0) error = driver->get_function(&gather, module, "gather");
  if (error == 0) return std::unique_ptr<GpuDigests>(new GpuDigests(*driver, piece_digests, gather));
  std::fprintf(stderr,
               "understudy: the GPU's driver does not take our code for digests (%s), so that contents are "
               "digested by the host, which takes far longer\n",
               name_of_error(*driver, error).c_str());
  return nullptr;
}

void GpuDigests::launch(void* function, uint64_t blocks, void** arguments) const {
  const int error = driver_.launch_kernel(function, static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, 0,
                                          nullptr, arguments, nullptr);
  if (error == 0) return;
  // An error of the device that first comes to light here is PyTorch's to tell, by its code.
  at::detail::getCUDAHooks().deviceSynchronize(at::detail::getCUDAHooks().current_device());
  TORCH_CHECK(false, "CUDA error: our code for digests cannot be launched (", name_of_error(driver_, error),
              ")");
}

void GpuDigests::need_room(uint64_t bytes) {
  if (bytes <= room_) return;
  const uint64_t room = std::max(bytes, 2 * room_);
  on_gpu_ = at::empty({static_cast<int64_t>(room)}, at::device(at::kCUDA).dtype(at::kByte));
  on_host_ = at::globalContext().getPinnedMemoryAllocator(at::kCUDA)->allocate(room);
  room_ = room;
}

std::vector<uint64_t> GpuDigests::of(const std::vector<const c10::Storage*>& contents) {
  std::vector<uint64_t> found(contents.size());
  for (size_t begin = 0; begin < contents.size();) {
    size_t end = begin;
    for (uint64_t pieces = 0; end < contents.size(); end++) {
      pieces += pieces_of(contents[end]->nbytes());
      if (pieces > kMostPieces && end != begin) break;
    }
    run(contents, begin, end, found);
    begin = end;
  }
  return found;
}

// Rows first, then leaves, then contents that are digested whole, as they are.
void GpuDigests::run(const std::vector<const c10::Storage*>& contents, size_t begin, size_t end,
                     std::vector<uint64_t>& found) {
  std::vector<Row> large, small;
  uint64_t pieces = 0, small_bytes = 0;
  for (size_t i = begin; i < end; i++) {
    const auto* const content = static_cast<const uint8_t*>(contents[i]->data());
    const uint64_t bytes = contents[i]->nbytes();
    const bool whole = bytes <= replay::kDigestWhole;
    (whole ? small : large).push_back({content, bytes, whole ? small_bytes : pieces});
    if (whole)
      small_bytes += bytes;
    else
      pieces += pieces_of(bytes);
  }
  const uint64_t large_at = 0, small_at = aligned(large.size() * sizeof(Row));
  const uint64_t leaves_at = small_at + aligned(small.size() * sizeof(Row));
  const uint64_t gathered_at = leaves_at + aligned(pieces * sizeof(uint64_t));
  const uint64_t all = gathered_at + small_bytes;
  need_room(std::max<uint64_t>(all, 1));
  auto* const host = static_cast<uint8_t*>(on_host_.get());
  auto* const gpu = static_cast<uint8_t*>(on_gpu_.mutable_data_ptr());
  std::copy(large.begin(), large.end(), reinterpret_cast<Row*>(host + large_at));
  std::copy(small.begin(), small.end(), reinterpret_cast<Row*>(host + small_at));
  const auto cross = [&](uint64_t from, uint64_t to, bool back) {
    if (from == to) return;
    const auto bytes = static_cast<int64_t>(to - from);
    at::Tensor here = at::from_blob(host + from, {bytes}, at::dtype(at::kByte));
    at::Tensor there = on_gpu_.narrow(0, static_cast<int64_t>(from), bytes);
    back ? here.copy_(there, /*non_blocking=*/true) : there.copy_(here, /*non_blocking=*/true);
  };
  cross(0, leaves_at, /*back=*/false);
  if (!large.empty()) {
    const uint8_t* rows = gpu + large_at;
    const uint8_t* leaves = gpu + leaves_at;
    auto count = static_cast<unsigned>(large.size());
    replay::piece::Keys keys = keys_;
    void* arguments[] = {&rows, &count, &pieces, &keys, &leaves};
    constexpr uint64_t kPiecesOfABlock = kThreads / replay::piece::kThreads;
    launch(piece_digests_, std::min<uint64_t>((pieces + kPiecesOfABlock - 1) / kPiecesOfABlock, kMostBlocks),
           arguments);
  }
  if (small_bytes != 0) {
    const uint8_t* rows = gpu + small_at;
    const uint8_t* gathered = gpu + gathered_at;
    void* arguments[] = {&rows, &gathered};
    launch(gather_, small.size(), arguments);
  }
  cross(leaves_at, all, /*back=*/true);
  c10::Event arrived(at::kCUDA);
  arrived.record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(on_gpu_.device()));
  arrived.synchronize();
  auto next_large = large.begin(), next_small = small.begin();
  for (size_t i = begin; i < end; i++) {
    if (contents[i]->nbytes() <= replay::kDigestWhole) {
      found[i] = replay::digest(host + gathered_at + next_small->first, next_small->bytes);
      ++next_small;
      continue;
    }
    const uint8_t* leaf = host + leaves_at + next_large->first * sizeof(uint64_t);
    replay::DigestTree tree;
    for (uint64_t left = pieces_of(next_large->bytes); left > 0; left--, leaf += sizeof(uint64_t)) {
      uint64_t value;
      std::memcpy(&value, leaf, sizeof value);
      tree.add_leaf(value);
    }
    found[i] = tree.end(next_large->bytes);
    ++next_large;
  }
}

}  // namespace understudy::server
