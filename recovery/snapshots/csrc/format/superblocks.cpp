#include "recovery/snapshots/csrc/format/superblocks.h"

#include <sys/random.h>

#include <cerrno>
#include <chrono>
#include <cstring>

namespace understudy::persistence {
namespace {

enum class State { kForeign, kOtherVersion, kDamaged, kValid };

constexpr const char* kMigrate =
    "; to migrate, open it with the release that wrote it, create a new store at another path with this "
    "release, "
    "and let the job persist there; nothing was changed";

State state_of(const Superblock& b) {
  if (b.magic != kStoreMagic) return State::kForeign;
  if (b.checksum != checksum_of(b))
    return b.version == kStoreVersion ? State::kDamaged : State::kOtherVersion;
  return b.version == kStoreVersion ? State::kValid : State::kOtherVersion;
}

// The checksum is right; are the numbers, too?
std::string wrong_numbers(const Superblock& b, const Geometry& geometry) {
  if (std::string wrong = geometry.wrong(); !wrong.empty()) return wrong;
  if (b.block_bytes != kBlock || b.first_slot != 2 * kBlock || b.slot_stride != geometry.stride() ||
      b.store_bytes != geometry.store_bytes())
    return "its parts do not lie where they belong";
  if (b.epoch > kMostCounted || b.latest_sequence > kMostCounted) return "its counters are out of range";
  if (b.latest_sequence != 0 &&
      (b.latest_slot >= b.slots || b.registered[b.latest_slot].sequence != b.latest_sequence))
    return "its latest snapshot is in no slot";
  for (uint32_t slot = 0; slot < kMostSlots; slot++) {
    const Registered& r = b.registered[slot];
    if (r.sequence > (slot < b.slots ? b.latest_sequence : 0))
      return "it registers a snapshot that was never taken";
    if (r.sequence == 0 && r.serial > kMostCounted) return "its counters are out of range";
  }
  return "";
}

// A bad sector reads as zeros: the other superblock counts then.
Superblock read_superblock(const Storage& storage, uint64_t offset) {
  const AlignedMemory memory = aligned_memory(kBlock);
  Superblock block{};
  try {
    storage.read(offset, memory.get(), kBlock);
  } catch (const StorageError& e) {
    if (e.code().value() != EIO) throw;
    return block;
  }
  std::memcpy(&block, memory.get(), sizeof block);
  return block;
}

Geometry geometry_of(const Superblock& b) {
  return {b.slots, b.slot_bytes, b.chunk_bytes, (b.incompatible & kExtentsHaveDigests) != 0};
}

}  // namespace

Superblock new_superblock(const Geometry& geometry) {
  Superblock b{};
  b.magic = kStoreMagic;
  b.version = kStoreVersion;
  b.block_bytes = kBlock;
  if (getrandom(b.uuid.data(), b.uuid.size(), 0) != static_cast<ssize_t>(b.uuid.size()))
    throw StorageError(errno, "no random number for the identity of a new store");
  b.store_bytes = geometry.store_bytes();
  b.first_slot = 2 * kBlock;
  b.slot_stride = geometry.stride();
  b.slot_bytes = geometry.slot_bytes;
  b.chunk_bytes = geometry.chunk_bytes;
  b.slots = geometry.slots;
  b.incompatible = kNewerHeadersCount | (geometry.extents_have_digests ? kExtentsHaveDigests : 0);
  b.created_ns = static_cast<uint64_t>(
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
  return b;
}

Superblock sealed(Superblock like, const Registry& registry) {
  like.epoch = registry.epoch;
  like.latest_sequence = registry.latest_sequence;
  like.latest_slot = registry.latest_slot;
  like.floor = registry.floor;
  for (size_t slot = 0; slot < registry.slots.size(); slot++) like.registered[slot] = registry.slots[slot];
  like.checksum = checksum_of(like);
  return like;
}

StoreError too_small(const std::string& name, uint64_t bytes) {
  return StoreError(
      name + " has " + std::to_string(bytes) +
      " bytes, too few for a snapshot store: it was cut off, or never was one. Restore it from a "
      "copy, or create a new store at another path; nothing was changed");
}

StoreFacts read_superblocks(const Storage& storage, bool exact) {
  const std::string& name = storage.name();
  const uint64_t there = storage.bytes();
  if (there < 2 * kBlock) throw too_small(name, there);
  StoreFacts facts;
  bool found = false, foreign = true;
  uint32_t version = 0;
  std::string damage;
  for (const uint64_t offset : {uint64_t{0}, kBlock}) {
    const Superblock block = read_superblock(storage, offset);
    const State state = state_of(block);
    foreign = foreign && state == State::kForeign;
    if (state == State::kOtherVersion) version = block.version;
    std::string wrong = state == State::kValid     ? wrong_numbers(block, geometry_of(block))
                        : state == State::kForeign ? "its magic is not that of a store"
                                                   : "its checksum is wrong";
    if (wrong.empty() && superblock_offset(block.epoch) != offset) wrong = "it lies in the other one's place";
    if (!wrong.empty()) {
      damage += std::string(damage.empty() ? "" : ", and ") + "superblock " + (offset == 0 ? "A" : "B") +
                " does not count: " + wrong;
    } else if (!found || block.epoch > facts.block.epoch) {
      facts.block = block;
      found = true;
    }
  }
  if (!found && foreign)
    throw StoreError(
        name +
        " is no snapshot store: its first two blocks have another magic. Check the path, or create "
        "a new store at another one; nothing was changed");
  if (!found && version != 0)
    throw StoreError(name + " has version " + std::to_string(version) +
                     " of the format, and this release reads version " + std::to_string(kStoreVersion) +
                     kMigrate);
  if (!found)
    throw StoreError(name + " is damaged: " + damage +
                     ". Restore it from a copy, or create a new store at another path; nothing was changed");
  const Superblock& b = facts.block;
  if ((b.incompatible & kExtentsHaveFormerDigests) != 0)
    throw StoreError(name + " is of an older release, whose digests of contents are other ones" + kMigrate);
  if (const uint32_t unknown = b.incompatible & ~kKnownFeatures; unknown != 0)
    throw StoreError(name + " uses features that this release does not know (bits " +
                     std::to_string(unknown) + ")" + kMigrate);
  if (there < b.store_bytes || (exact && there != b.store_bytes))
    throw StoreError(
        name + " has " + std::to_string(there) + " bytes, and the store in it " +
        std::to_string(b.store_bytes) +
        ": it was cut off or not copied whole. Copy it again; to migrate to other sizes, create a "
        "new store and let the job persist there; nothing was changed");
  facts.geometry = geometry_of(b);
  facts.registry = {b.epoch,
                    b.latest_sequence,
                    static_cast<uint32_t>(b.latest_slot),
                    b.floor,
                    {b.registered, b.registered + b.slots}};
  facts.newer_headers_count = (b.incompatible & kNewerHeadersCount) != 0;
  facts.note = damage;
  return facts;
}

}  // namespace understudy::persistence
