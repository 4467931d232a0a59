#include "proxy_server/csrc/digest_staging.h"

#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>

#include "replay/csrc/digest.h"

namespace understudy::server {

void* DigestStaging::half(int64_t piece) const {
  return static_cast<uint8_t*>(memory_.get()) + (piece % 2) * kPiece;
}

uint64_t DigestStaging::digest(const at::Tensor& bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
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
  replay::StreamedDigest digest;
  if (pieces > 0) fetch(0);
  for (int64_t piece = 0; piece < pieces; piece++) {
    if (piece + 1 < pieces) fetch(piece + 1);
    arrived[static_cast<size_t>(piece % 2)].synchronize();
    digest.add(half(piece), static_cast<size_t>(length(piece)));
  }
  return digest.value();
}

}  // namespace understudy::server
