// The snapshot store on disk: two superblocks, then slots of equal size.  docs/snapshot-format.md explains
// it.
//
//   0        superblock A (even epochs)
//   4096     superblock B (odd epochs)
//   8192     slot 0: header block | payload, padded to a block | extent table, chunk table, padded to a block
//   …        slot 1, …
//
// Little-endian; every block is a multiple of 4096 bytes at such an offset; offsets, never pointers.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "recovery/snapshots/csrc/storage/aligned_memory.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::persistence {

static_assert(std::endian::native == std::endian::little);

// What is wrong with a store or with what was asked of it, in a sentence.
class StoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No slot became free in the time that the caller gave.
class StoreFull : public StoreError {
 public:
  using StoreError::StoreError;
};

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kStoreMagic = 0x5345524f54535355ull;  // "USSTORES"
constexpr uint64_t kSlotMagic = 0x544f4c5354535355ull;   // "USSTSLOT"
constexpr uint32_t kStoreVersion = 1;
constexpr uint32_t kFewestSlots = 2;
constexpr uint32_t kMostSlots = 128;
constexpr uint64_t kMostChunkBytes = 256ull << 20;
// Both tables of a slot are read whole; these bounds keep that to 128 MiB each, whatever a file claims.
constexpr uint64_t kMostChunks = 1ull << 24;
constexpr uint64_t kMostExtents = 1ull << 22;
constexpr uint64_t kMostJobBytes = 255;
constexpr uint64_t kMostCounted = 1ull
                                  << 62;   // nobody counts that far; what counts on from there stays a number
constexpr uint64_t kExtentAlignment = 64;  // of an extent within the payload

// A bit of Superblock::incompatible: the superblock may be older than the headers.  A free slot's row has, as
// its serial, the sequence up to which headers in it are known; one with a larger sequence counts if header,
// tables and chunks are right.  Stores of releases before it do without.
constexpr uint32_t kNewerHeadersCount = 1;
// Another one: rows of extents have the digest of their content (ContentDigest), and there is no chunk table.
// What lies between extents is anything then, as it is no part of a digest.
constexpr uint32_t kExtentsHaveDigests = 4;
constexpr uint32_t kExtentsHaveFormerDigests = 2;  // XXH3-64 of the whole; nobody reads these any more
constexpr uint32_t kKnownFeatures = kNewerHeadersCount | kExtentsHaveDigests;

using Uuid = std::array<uint8_t, 16>;

constexpr uint64_t rounded_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
constexpr uint64_t parts_of(uint64_t bytes, uint64_t part) { return bytes / part + (bytes % part != 0); }

// A slot that holds a snapshot: which one.  Sequence 0: it holds none that counts.
struct Registered {
  uint64_t sequence = 0;
  uint64_t serial = 0;
};

struct Superblock {
  uint64_t magic;
  uint32_t version;
  uint32_t block_bytes;
  Uuid uuid;
  uint64_t store_bytes;  // of all that is described here; a partition may be larger
  uint64_t first_slot;   // offset
  uint64_t slot_stride;
  uint64_t slot_bytes;  // for payload and tables; the header block is extra
  uint64_t chunk_bytes;
  uint64_t created_ns;
  uint32_t slots;
  uint32_t compatible;    // bits of features that an older release may ignore
  uint32_t incompatible;  // bits of features that an older release must not open
  uint32_t reserved32;
  uint64_t migrated_from;  // version of the store that this one was made from; 0: none
  uint64_t reserved[4];
  uint64_t epoch;  // from here on it changes
  uint64_t latest_sequence;
  uint64_t latest_slot;
  uint64_t floor;  // serial; slots below it are free
  Registered registered[kMostSlots];
  uint8_t zero[1872];
  uint64_t checksum;  // XXH3-64 of all before it
};
static_assert(sizeof(Superblock) == kBlock && std::is_trivially_copyable_v<Superblock>);
static_assert(offsetof(Superblock, epoch) == 136 && offsetof(Superblock, registered) == 168);

struct SlotHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t slot;  // its own number: a block that was written to the wrong place does not count
  Uuid uuid;      // of the store
  uint64_t sequence;
  uint64_t serial;
  uint64_t step;
  uint32_t rank;
  uint32_t world;
  uint64_t time_ns;  // wall clock
  uint64_t payload_bytes;
  uint64_t chunk_bytes;
  uint64_t extents;
  uint64_t chunks;
  uint64_t tables_digest;  // XXH3-64 of both tables
  uint32_t job_bytes;
  uint32_t reserved32;
  char job[256];
  uint8_t zero[3712];
  uint64_t checksum;  // XXH3-64 of all before it
};
static_assert(sizeof(SlotHeader) == kBlock && std::is_trivially_copyable_v<SlotHeader>);

struct Extent {
  uint32_t kind;
  uint32_t reserved;
  uint64_t id;
  uint64_t bytes;
  uint64_t offset;      // within the payload
  uint64_t digest = 0;  // ContentDigest; 0: not known
};
static_assert(sizeof(Extent) == 40 && offsetof(Extent, digest) == 32);

enum ExtentKind : uint32_t { kDeviceBuffer = 1, kGenerator, kManifest, kClientState, kLog, kElsewhere };

template <class Block>
uint64_t checksum_of(const Block& block) {
  return replay::digest(&block, offsetof(Block, checksum));
}

// Sizes of a store, and where its parts lie.
struct Geometry {
  uint32_t slots = 0;
  uint64_t slot_bytes = 0;
  uint64_t chunk_bytes = 0;
  bool extents_have_digests = true;  // kExtentsHaveDigests

  // Of a row of the extent table.
  uint64_t row_bytes() const { return extents_have_digests ? sizeof(Extent) : offsetof(Extent, digest); }
  // Rows of the chunk table.
  uint64_t chunks(uint64_t payload_bytes) const {
    return extents_have_digests ? 0 : parts_of(payload_bytes, chunk_bytes);
  }
  uint64_t tables_bytes(uint64_t extents, uint64_t payload_bytes) const {
    return extents * row_bytes() + chunks(payload_bytes) * sizeof(uint64_t);
  }
  // What a snapshot takes of a slot's slot_bytes.  Precondition: both within bounds.
  uint64_t room_for(uint64_t payload_bytes, uint64_t extents) const {
    return rounded_up(payload_bytes, kBlock) + rounded_up(tables_bytes(extents, payload_bytes), kBlock);
  }

  uint64_t stride() const { return kBlock + slot_bytes; }
  uint64_t store_bytes() const { return 2 * kBlock + slots * stride(); }
  uint64_t header_offset(uint32_t slot) const { return 2 * kBlock + slot * stride(); }
  uint64_t payload_offset(uint32_t slot) const { return header_offset(slot) + kBlock; }
  // Empty if a store can have these sizes, else what is wrong.
  std::string wrong() const;
};

}  // namespace understudy::persistence
