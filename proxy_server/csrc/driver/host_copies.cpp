#include "proxy_server/csrc/driver/host_copies.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>

#include "proxy_server/csrc/driver/digest_staging.h"

namespace understudy::server {

size_t HostCopies::queue(const HostCopy* copies, size_t count) {
  constexpr uint64_t kAlignment = 64;
  const auto taken_by = [](const HostCopy& copy) {
    return (copy.from->nbytes() + kAlignment - 1) / kAlignment * kAlignment;
  };
  queued_.clear();
  uint64_t wanted = 0;
  size_t fit = 0;
  for (; fit < count && wanted + taken_by(copies[fit]) <= kMost; fit++) wanted += taken_by(copies[fit]);
  if (wanted > room_) {
    const uint64_t room = std::min(kMost, std::max(wanted, 2 * room_));
    memory_ = at::globalContext().getPinnedMemoryAllocator(copies->from->device().type())->allocate(room);
    room_ = room;
  }
  auto* place = static_cast<uint8_t*>(memory_.get());
  for (size_t i = 0; i < fit; i++) {
    const c10::Storage& from = *copies[i].from;
    const uint64_t bytes = from.nbytes();
    if (bytes == 0) continue;
    at::from_blob(place, {static_cast<int64_t>(bytes)}, at::dtype(at::kByte))
        .copy_(bytes_of(from, 0, bytes), /*non_blocking=*/true);
    queued_.push_back({place, copies[i].to, bytes});
    place += taken_by(copies[i]);
  }
  return fit;
}

void HostCopies::finish() {
  for (const Queued& one : queued_) std::memcpy(one.to, one.staged, one.bytes);
  queued_.clear();
}

}  // namespace understudy::server
