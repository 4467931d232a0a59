// What a snapshot is made of, before it is written.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "recovery/snapshots/csrc/format/store_format.h"
#include "recovery/snapshots/csrc/storage/stream_copy.h"

namespace understudy::persistence {

class Source {
 public:
  virtual ~Source() = default;
  virtual uint64_t bytes() const = 0;
  // Adds to `digest`, if there is one, what it copies.  The copy may pass the caches by: who reads it next is
  // the storage.  Any thread.  Precondition: inside bytes().  Throws what it likes; the snapshot is then
  // cancelled.
  virtual void copy(uint64_t offset, uint8_t* to, uint64_t bytes, replay::StreamedDigest* digest) const = 0;
  // Of so many bytes from an offset on.
  virtual uint64_t digest(uint64_t offset, uint64_t bytes) const = 0;
  // What comes at an offset: bytes that are to be copied, or that may be written from where they are.
  struct Span {
    const uint8_t* in_place;  // none: to be copied; else offset, memory and bytes are multiples of kBlock
    uint64_t bytes;
  };
  virtual Span span(uint64_t offset) const { return {nullptr, bytes() - offset}; }
  // All of it has been copied.  Throws if that was not its content any more; the snapshot is then cancelled.
  virtual void confirm() const {}
};

// Pieces of memory at offsets that rise; zeros between them.
class GatherSource : public Source {
 public:
  struct Piece {
    const uint8_t* data;
    uint64_t bytes;
    uint64_t offset;  // within the payload
  };

  explicit GatherSource(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {
    for (const Piece& piece : pieces_) bytes_ = std::max(bytes_, piece.offset + piece.bytes);
  }

  uint64_t bytes() const override { return bytes_; }

  void copy(uint64_t offset, uint8_t* to, uint64_t bytes, replay::StreamedDigest* digest) const override {
    const uint64_t end = offset + bytes;
    auto piece = find(offset);
    while (offset < end) {
      const uint64_t begin = piece == pieces_.end() ? end : std::min(end, std::max(offset, piece->offset));
      if (begin != offset) {
        std::memset(to, 0, begin - offset);
        if (digest != nullptr) digest->add(to, begin - offset);
      }
      to += begin - offset;
      offset = begin;
      if (offset == end) return;
      const uint64_t length = std::min(end, piece->offset + piece->bytes) - offset;
      if (length != 0) copy_one(piece->data + (offset - piece->offset), to, length, digest);
      to += length;
      offset += length;
      ++piece;
    }
  }

  // Precondition: inside one piece.
  uint64_t digest(uint64_t offset, uint64_t bytes) const override {
    if (bytes == 0) return replay::content_digest(nullptr, 0);
    const auto piece = find(offset);
    return replay::content_digest(piece->data + (offset - piece->offset), bytes);
  }

 protected:
  void set_bytes(uint64_t bytes) { bytes_ = bytes; }

 private:
  std::vector<Piece>::const_iterator find(uint64_t offset) const {
    return std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                            [](uint64_t at, const Piece& p) { return at < p.offset + p.bytes; });
  }

  // Below this the ragged ends of a stream cost more than it saves.
  static constexpr uint64_t kWorthAStream = 16 << 10;

  // The digest first: it brings the content into the caches, from where it is copied.
  static void copy_one(const uint8_t* from, uint8_t* to, uint64_t bytes, replay::StreamedDigest* digest) {
    if (digest != nullptr) digest->add(from, bytes);
    if (bytes >= kWorthAStream && can_stream(Stream::kSse2))
      stream_copy(best_stream(), to, from, bytes);
    else
      std::memcpy(to, from, bytes);
  }

  std::vector<Piece> pieces_;
  uint64_t bytes_ = 0;
};

}  // namespace understudy::persistence
