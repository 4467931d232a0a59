#include "proxy_server/csrc/snapshots/side_copies.h"

#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

namespace understudy::server {

SideCopies::SideCopies(c10::Stream beside, uint64_t most_bytes)
    : most_bytes_(most_bytes), stream_(beside), copied_(beside.device_type()) {
  c10::Event before(beside.device_type());
  before.record(c10::impl::VirtualGuardImpl(beside.device_type()).getStream(beside.device()));
  before.block(stream_);
}

void SideCopies::copy(const void* from, uint64_t bytes, void* to) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(bytes <= most_bytes_, "too much is to be copied at once");
  if (bytes == 0) return;
  const c10::StreamGuard beside(stream_);
  if (staged_.get() == nullptr)
    staged_ = at::globalContext().getPinnedMemoryAllocator(stream_.device_type())->allocate(most_bytes_);
  const auto size = static_cast<int64_t>(bytes);
  const at::Tensor there = at::for_blob(const_cast<void*>(from), {size})
                               .options(at::device(stream_.device()).dtype(at::kByte))
                               .target_device(stream_.device())
                               .make_tensor();
  at::from_blob(staged_.get(), {size}, at::dtype(at::kByte)).copy_(there, /*non_blocking=*/true);
  copied_.record(stream_);
  copied_.synchronize();
  std::memcpy(to, staged_.get(), bytes);
}

}  // namespace understudy::server
