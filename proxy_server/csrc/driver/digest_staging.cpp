#include "proxy_server/csrc/driver/digest_staging.h"

#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "proxy_server/csrc/driver/driver_errors.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::server {

void* DigestStaging::half(int64_t piece) const {
  return static_cast<uint8_t*>(memory_.get()) + (piece % 2) * kPiece;
}

at::Tensor bytes_of(const c10::Storage& storage, uint64_t offset, uint64_t bytes) {
  const c10::DispatchKey key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                    c10::scalarTypeToTypeMeta(at::kByte));
  const int64_t size = static_cast<int64_t>(bytes), stride = 1;
  t.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(size), c10::IntArrayRef(stride),
                                                 static_cast<int64_t>(offset));
  return t;
}

// What cannot be done for want of memory is done another way.
template <class Do>
static void if_memory_allows(Do&& act) {
  try {
    act();
  } catch (const c10::Error& e) {
    const bool pinned = std::strstr(e.what(), "CUDA error: out of memory") != nullptr;
    if (!out_of_memory(e) && !pinned) throw;
  }
}

void DigestStaging::load() {
  if (!std::exchange(tried_, true)) gpu_ = GpuDigests::load();
}

bool DigestStaging::on_gpu() {
  const std::lock_guard<std::mutex> lock(mutex_);
  load();
  return gpu_ != nullptr;
}

std::vector<uint64_t> DigestStaging::take(const std::vector<const c10::Storage*>& contents,
                                          const std::vector<HostCopy>& copies) {
  const std::lock_guard<std::mutex> lock(mutex_);
  load();
  std::vector<const c10::Storage*> there;
  for (const c10::Storage* content : contents)
    if (content->device().is_cuda()) there.push_back(content);
  std::vector<HostCopy> from_there;
  for (const HostCopy& copy : copies)
    if (copy.from->device().is_cuda())
      from_there.push_back(copy);
    else
      copy_at_once(copy);
  size_t queued = 0;
  std::vector<uint64_t> made;
  if_memory_allows([&] { queued = copies_.queue(from_there.data(), from_there.size()); });
  if (gpu_ && !there.empty()) if_memory_allows([&] { made = gpu_->of(there); });
  if (made.empty() && queued != 0) {
    const c10::impl::VirtualGuardImpl gpu(c10::kCUDA);
    c10::Event passed(c10::kCUDA);
    passed.record(gpu.getStream(from_there.front().from->device()));
    passed.synchronize();
  }
  copies_.finish();
  for (size_t i = queued; i < from_there.size(); i++) copy_at_once(from_there[i]);
  std::vector<uint64_t> found;
  size_t next = 0;
  for (const c10::Storage* content : contents) {
    if (!content->device().is_cuda())
      found.push_back(replay::content_digest(content->data(), content->nbytes()));
    else
      found.push_back(made.empty() ? through_host(*content) : made[next++]);
  }
  return found;
}

void DigestStaging::copy_at_once(const HostCopy& copy) const {
  const uint64_t bytes = copy.from->nbytes();
  if (bytes == 0) return;
  at::from_blob(copy.to, {static_cast<int64_t>(bytes)}, at::dtype(at::kByte))
      .copy_(bytes_of(*copy.from, 0, bytes));
}

uint64_t DigestStaging::through_host(const c10::Storage& content) {
  const at::Tensor bytes = bytes_of(content, 0, content.nbytes());
  const c10::DeviceType type = bytes.device().type();
  if (memory_.get() == nullptr)
    memory_ = at::globalContext().getPinnedMemoryAllocator(type)->allocate(2 * kPiece);
  const int64_t size = bytes.size(0), pieces = (size + kPiece - 1) / kPiece;
  const auto length = [&](int64_t piece) { return std::min(kPiece, size - piece * kPiece); };
  const c10::Stream stream = c10::impl::VirtualGuardImpl(type).getStream(bytes.device());
  std::array<c10::Event, 2> arrived{c10::Event(type), c10::Event(type)};
  const auto fetch = [&](int64_t piece) {
    at::from_blob(half(piece), {length(piece)}, at::TensorOptions().dtype(at::kByte))
        .copy_(bytes.narrow(0, piece * kPiece, length(piece)), /*non_blocking=*/true);
    arrived[static_cast<size_t>(piece % 2)].record(stream);
  };
  replay::ContentDigest digest;
  if (pieces > 0) fetch(0);
  for (int64_t piece = 0; piece < pieces; piece++) {
    if (piece + 1 < pieces) fetch(piece + 1);
    arrived[static_cast<size_t>(piece % 2)].synchronize();
    digest.add(half(piece), static_cast<size_t>(length(piece)));
  }
  return digest.value();
}

}  // namespace understudy::server
