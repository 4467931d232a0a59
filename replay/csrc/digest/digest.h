// Digests: XXH3-64; of what buffers hold, in pieces. 0 is reserved for "none".
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "replay/csrc/digest/xxh3.h"

namespace understudy::replay {

inline uint64_t no_zero(uint64_t value) { return value == 0 ? 1 : value; }

inline uint64_t digest(const void* data, size_t bytes, xxh3::Width width = xxh3::chosen) {
  return no_zero(xxh3::of(data, bytes, width));
}

// The same of what comes in pieces.
class StreamedDigest {
 public:
  explicit StreamedDigest(xxh3::Width width = xxh3::chosen) : stream_(width) {}
  void add(const void* data, size_t bytes) { stream_.add(data, bytes); }
  uint64_t value() const { return no_zero(stream_.value()); }

 private:
  xxh3::Stream stream_;
};

// A buffer's content has a tree of digests, so that a GPU can make them where it lies: up to kDigestWhole
// bytes are digested as they are. Of more, the XXH3-64 of each piece of kDigestPiece bytes (the last one is
// filled up with zeroes) is a leaf, and the digest is that of all leaves, with the number of bytes behind
// them.
inline constexpr size_t kDigestPiece = 4096;
inline constexpr size_t kDigestWhole = 256;  // a leaf would save little on its way to the host

class DigestTree {
 public:
  explicit DigestTree(xxh3::Width width = xxh3::chosen) : width_(width) {}

  void add_leaf(uint64_t leaf) {
    leaves_[count_++] = leaf;
    if (count_ == kNewest) {
      if (!root_) root_.emplace(width_);
      root_->add(leaves_.data(), sizeof(uint64_t) * std::exchange(count_, 0));
    }
  }
  void add_piece(const uint8_t* piece) { add_leaf(xxh3::of(piece, kDigestPiece, width_)); }
  // The last piece, of `bytes` bytes; `all` have the pieces together.
  uint64_t end(const uint8_t* piece, size_t bytes, uint64_t all) {
    std::array<uint8_t, kDigestPiece> filled{};
    std::memcpy(filled.data(), piece, bytes);
    add_piece(filled.data());
    return end(all);
  }
  uint64_t end(uint64_t all) {
    leaves_[count_++] = all;
    if (!root_) return digest(leaves_.data(), sizeof(uint64_t) * count_, width_);
    root_->add(leaves_.data(), sizeof(uint64_t) * count_);
    return no_zero(root_->value());
  }

 private:
  static constexpr size_t kNewest = 64;
  xxh3::Width width_;
  std::array<uint64_t, kNewest + 1> leaves_;  // the newest, and room for the number of bytes
  size_t count_ = 0;
  std::optional<xxh3::Stream> root_;  // of those before
};

inline uint64_t content_digest(const void* data, size_t bytes, xxh3::Width width = xxh3::chosen) {
  if (bytes <= kDigestWhole) return digest(data, bytes, width);
  const auto* piece = static_cast<const uint8_t*>(data);
  DigestTree tree(width);
  size_t left = bytes;
  for (; left > kDigestPiece; piece += kDigestPiece, left -= kDigestPiece) tree.add_piece(piece);
  return tree.end(piece, left, bytes);
}

// The same of what comes in parts of any size.
class ContentDigest {
 public:
  explicit ContentDigest(xxh3::Width width = xxh3::chosen) : width_(width), tree_(width) {}

  void add(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    bytes_ += bytes;
    while (bytes != 0) {
      if (held_ == kDigestPiece) {
        tree_.add_piece(rest_.data());
        held_ = 0;
      }
      for (; held_ == 0 && bytes > kDigestPiece; from += kDigestPiece, bytes -= kDigestPiece)
        tree_.add_piece(from);
      const size_t part = std::min(kDigestPiece - held_, bytes);
      std::memcpy(rest_.data() + held_, from, part);
      held_ += part;
      from += part;
      bytes -= part;
    }
  }
  uint64_t value() const {
    if (bytes_ <= kDigestWhole) return digest(rest_.data(), held_, width_);
    return DigestTree(tree_).end(rest_.data(), held_, bytes_);
  }

 private:
  xxh3::Width width_;
  uint64_t bytes_ = 0;
  std::array<uint8_t, kDigestPiece> rest_;  // the newest bytes, which may be the last ones
  size_t held_ = 0;
  DigestTree tree_;
};

}  // namespace understudy::replay
