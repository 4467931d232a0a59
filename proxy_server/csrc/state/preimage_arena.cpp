#include "proxy_server/csrc/state/preimage_arena.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "proxy_server/csrc/driver/driver_errors.h"

namespace understudy::server {
namespace {

constexpr uint64_t kPieceAlignment = 512;  // bytes, as CUDA's own allocations
constexpr uint64_t kBlockUnit = 2 << 20;   // bytes; the caching allocator takes no less for a large block
constexpr size_t kMostBlocks = 4;     // rows of pre-images that wait for the peers' floor, and a spare one
constexpr uint64_t kSpareShare = 10;  // of the device's memory one part stays free when a block is taken
constexpr uint64_t kFullShare = 20;   // with less than that part free the arena makes way
constexpr uint64_t kUnusedFor = 64;   // commits
constexpr uint64_t kFirstAwayFor = 64, kLongestAwayFor = 64 << 10;  // commits

uint64_t rounded_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

struct PreimageArena::Block {
  explicit Block(c10::Storage storage) : memory(std::move(storage)) { holes[0] = memory.nbytes(); }

  std::optional<uint64_t> cut(uint64_t bytes) {
    const auto hole =
        std::find_if(holes.begin(), holes.end(), [&](const auto& h) { return h.second >= bytes; });
    if (hole == holes.end()) return std::nullopt;
    const auto [offset, length] = *hole;
    holes.erase(hole);
    if (length > bytes) holes[offset + bytes] = length - bytes;
    pieces++;
    return offset;
  }

  void mend(uint64_t offset, uint64_t bytes) {
    pieces--;
    auto behind = holes.lower_bound(offset);
    if (behind != holes.end() && behind->first == offset + bytes) {
      bytes += behind->second;
      behind = holes.erase(behind);
    }
    if (behind != holes.begin()) {
      const auto before = std::prev(behind);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    holes[offset] = bytes;
  }

  c10::Storage memory;
  std::map<uint64_t, uint64_t> holes;  // offset -> bytes
  uint64_t pieces = 0;                 // that are there, or wait for the device
};

struct PreimageArena::Piece {
  static void give_back(void* context);

  std::shared_ptr<Blocks> blocks;
  Block* block;
  uint64_t offset, bytes;
  uint64_t passes;  // of the device, when it was taken
};

struct PreimageArena::Blocks {
  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const Block& block : all) bytes += block.memory.nbytes();
    return bytes;
  }
  void free(const Piece& piece) {
    used -= piece.bytes;
    piece.block->mend(piece.offset, piece.bytes);
  }

  std::mutex mutex;
  std::list<Block> all;
  std::vector<std::unique_ptr<Piece>> waiting;  // for the device to pass
  uint64_t passes = 0;
  uint64_t used = 0, most_used = 0;  // bytes, in pieces
};

void PreimageArena::Piece::give_back(void* context) {
  std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
  const std::shared_ptr<Blocks> blocks = piece->blocks;
  const std::lock_guard<std::mutex> lock(blocks->mutex);
  if (piece->passes != blocks->passes) return blocks->free(*piece);
  piece->blocks.reset();  // it lies in them now
  blocks->waiting.push_back(std::move(piece));
}

PreimageArena::PreimageArena(const Driver& driver)
    : driver_(driver), blocks_(std::make_shared<Blocks>()), away_for_(kFirstAwayFor) {}

std::optional<c10::Storage> PreimageArena::take(uint64_t bytes) {
  const uint64_t whole = rounded_up(bytes, kPieceAlignment);
  const std::lock_guard<std::mutex> lock(blocks_->mutex);
  for (Block& block : blocks_->all) {
    const auto offset = block.cut(whole);
    if (!offset) continue;
    blocks_->used += whole;
    blocks_->most_used = std::max(blocks_->most_used, blocks_->used);
    auto piece = std::make_unique<Piece>(Piece{blocks_, &block, *offset, whole, blocks_->passes});
    void* const at = static_cast<uint8_t*>(block.memory.mutable_data()) + *offset;
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                        c10::DataPtr(at, piece.release(), &Piece::give_back, block.memory.device()), nullptr,
                        /*resizable=*/false);
  }
  missing_ += whole;
  return std::nullopt;
}

bool PreimageArena::holds(const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() == &Piece::give_back;
}

void PreimageArena::device_passed() {
  const std::lock_guard<std::mutex> lock(blocks_->mutex);
  blocks_->passes++;
  for (const auto& piece : blocks_->waiting) blocks_->free(*piece);
  blocks_->waiting.clear();
}

void PreimageArena::adjust() {
  commits_++;
  const bool has_some = bytes() != 0;
  if (has_some && device_is_full()) {
    if (give_up()) keep_away();
  } else if (has_some && commits_ % kUnusedFor == 0 && hardly_used()) {
    give_up();  // what is wanted all the same is missed next, and comes back
  }
  const uint64_t missing = std::exchange(missing_, 0);
  if (missing != 0 && commits_ >= away_until_) grow(rounded_up(missing, kBlockUnit));
}

// Since it was asked last.
bool PreimageArena::hardly_used() {
  const std::lock_guard<std::mutex> lock(blocks_->mutex);
  const uint64_t most = std::exchange(blocks_->most_used, blocks_->used);
  return 2 * most + kBlockUnit * blocks_->all.size() <= blocks_->bytes();
}

// In place of the smallest one without a piece, where there are many.
void PreimageArena::grow(uint64_t bytes) {
  const auto idle = [](const Block& block) { return block.pieces == 0; };
  const std::lock_guard<std::mutex> lock(blocks_->mutex);
  auto& all = blocks_->all;
  auto replaced = all.end();
  if (all.size() >= kMostBlocks) {
    for (auto one = all.begin(); one != all.end(); ++one)
      if (idle(*one) && (replaced == all.end() || one->memory.nbytes() < replaced->memory.nbytes()))
        replaced = one;
    if (replaced == all.end()) return;
    bytes += replaced->memory.nbytes();
  }
  const auto [free_bytes, total_bytes] =
      c10::getDeviceAllocator(driver_.device().type())->getMemoryInfo(driver_.device().index());
  if (free_bytes < bytes + total_bytes / kSpareShare) return;
  if (replaced != all.end()) all.erase(replaced);
  try {
    all.emplace_back(driver_.allocate(bytes));
  } catch (const c10::Error& e) {  // what the program may have is limited (memory fraction)
    if (!out_of_memory(e)) throw;
    keep_away();
  }
}

// What the caching allocator holds for the program counts as taken: it has had that in use.
bool PreimageArena::device_is_full() const {
  const auto [free_bytes, total_bytes] =
      c10::getDeviceAllocator(driver_.device().type())->getMemoryInfo(driver_.device().index());
  return free_bytes < total_bytes / kFullShare;
}

bool PreimageArena::give_up() {
  const std::lock_guard<std::mutex> lock(blocks_->mutex);
  return blocks_->all.remove_if([](const Block& block) { return block.pieces == 0; }) != 0;
}

void PreimageArena::keep_away() {
  away_until_ = commits_ + away_for_;
  away_for_ = std::min(2 * away_for_, kLongestAwayFor);
}

uint64_t PreimageArena::bytes() const {
  const std::lock_guard<std::mutex> lock(blocks_->mutex);
  return blocks_->bytes();
}

}  // namespace understudy::server
