#include "proxy_server/csrc/snapshots/copy_list.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "replay/csrc/digest/digest.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/log_map.h"

namespace understudy::server {
namespace {
constexpr int kLooks = 200;  // at a piece that is being copied, before who needs it sleeps
}

CopyList::CopyList(std::vector<CopyRow> rows, Copy copy, uint64_t piece_bytes, std::function<void()> prepare)
    : rows_(std::move(rows)),
      copy_(std::move(copy)),
      piece_bytes_(piece_bytes),
      prepare_(std::move(prepare)) {
  first_.reserve(rows_.size() + 1);
  first_.push_back(0);
  for (const CopyRow& row : rows_) {
    if (row.copies) bytes_ += row.bytes;
    first_.push_back(first_.back() + (row.copies ? (row.bytes + piece_bytes_ - 1) / piece_bytes_ : 0));
  }
  pieces_ = std::make_unique<Piece[]>(first_.back());
  for (size_t row = 0; row < rows_.size(); row++)
    for (size_t piece = first_[row]; piece < first_[row + 1]; piece++)
      pieces_[piece].row = static_cast<uint32_t>(row);
}

bool CopyList::claim(size_t index) {
  Piece& piece = pieces_[index];
  uint32_t state = kUnclaimed;
  if (!piece.state.compare_exchange_strong(state, kCopying, std::memory_order_acquire)) return false;
  const CopyRow& row = rows_[piece.row];
  const uint64_t offset = (index - first_[piece.row]) * piece_bytes_;
  const uint64_t bytes = std::min(piece_bytes_, row.bytes - offset);
  if (!failed()) try {
      if (row.fresh && !replay::reserve_memory(row.to + offset, bytes))
        failed_.store(true, std::memory_order_release);
      else
        copy_(piece.row, offset, bytes, row.to + offset);
    } catch (...) {
      failed_.store(true, std::memory_order_release);
      done(piece);
      throw;
    }
  done(piece);
  return true;
}

void CopyList::done(Piece& piece) {
  piece.state.store(kDone, std::memory_order_release);
  piece.state.notify_all();
}

void CopyList::wait_for(size_t piece) {
  auto& state = pieces_[piece].state;
  for (int i = 0; i < kLooks; i++) {
    if (state.load(std::memory_order_acquire) == kDone) return;
    replay::cpu_relax();
  }
  while (state.load(std::memory_order_acquire) != kDone) state.wait(kCopying, std::memory_order_acquire);
}

bool CopyList::copy_some(uint64_t bytes) {
  // Small buffers cost more than their bytes say.
  constexpr uint64_t kEach = 4096;
  const size_t end = first_.back();
  for (uint64_t done = 0; done < bytes && !cancelled();) {
    const size_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    if (piece >= end) return false;
    if (claim(piece)) done += kEach + std::min(piece_bytes_, rows_[pieces_[piece].row].bytes);
  }
  return !cancelled() && next_.load(std::memory_order_relaxed) < end;
}

void CopyList::settle(size_t row) {
  // From its end on: who copies in order is at its beginning.
  for (size_t piece = first_[row + 1]; piece-- > first_[row];)
    if (pieces_[piece].state.load(std::memory_order_acquire) != kDone) claim(piece);
  for (size_t piece = first_[row]; piece < first_[row + 1]; piece++) wait_for(piece);
}

void CopyList::finish() {
  for (size_t index = 0; index < rows_.size(); index++) {
    if (cancelled() || failed()) break;
    for (size_t piece = first_[index]; piece < first_[index + 1]; piece++) wait_for(piece);
    CopyRow& row = rows_[index];
    if (row.digests && !row.digested) row.digest = replay::content_digest(row.to, row.bytes);
  }
  if (!cancelled()) finished_.store(true, std::memory_order_release);
}

void CopyList::digest_copied(size_t piece, bool ours, Digesting& digesting) {
  const size_t number = pieces_[piece].row;
  CopyRow& row = rows_[number];
  if (piece == first_[number]) {
    digesting.digest = replay::ContentDigest();
    digesting.whole = row.digests;
  }
  digesting.whole = digesting.whole && ours && (piece == first_[number] || piece == digesting.next);
  if (!digesting.whole) return;
  digesting.next = piece + 1;
  const uint64_t offset = (piece - first_[number]) * piece_bytes_;
  digesting.digest.add(row.to + offset, std::min(piece_bytes_, row.bytes - offset));
  row.digested = piece + 1 == first_[number + 1];
  if (row.digested) row.digest = digesting.digest.value();
}

void CopyList::run() {
  if (prepare_) prepare_();
  Digesting digesting;
  try {
    while (!cancelled()) {
      const size_t piece = next_.fetch_add(1, std::memory_order_relaxed);
      if (piece >= first_.back()) break;
      const bool ours = claim(piece);
      if (!failed()) digest_copied(piece, ours, digesting);
    }
  } catch (const std::exception& e) {  // whoever uses the device finds out, too
    std::fprintf(stderr, "understudy: a snapshot cannot be copied: %s\n", e.what());
  }
  finish();
}

}  // namespace understudy::server
