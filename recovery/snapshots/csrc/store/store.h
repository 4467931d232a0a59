// A snapshot store: persists snapshots, several at a time, and reads them back.
//
//   persist():  payload, tables and header written -> one sync -> superblock written
//
// The superblock becomes durable with the next sync, whoever's; only then the slots that it drops are free.
// One that is lost in a crash is made up for by the headers that are newer than it. Where syncs are of
// ranges, the superblock has its own at once.
//
// Every method may be called from any thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "recovery/snapshots/csrc/format/superblocks.h"
#include "recovery/snapshots/csrc/slots/chunk_pool.h"
#include "recovery/snapshots/csrc/slots/slot_table.h"
#include "recovery/snapshots/csrc/storage/storage.h"
#include "recovery/snapshots/csrc/store/durability.h"
#include "recovery/snapshots/csrc/store/snapshot_reader.h"
#include "recovery/snapshots/csrc/writing/contents.h"
#include "recovery/snapshots/csrc/writing/pipeline.h"

namespace understudy::persistence {

struct StoreOptions {
  bool writable = true;
  bool exact = true;  // the storage must be just as large as the store
  uint64_t pool_bytes = 64ull << 20;
};

struct Identity {
  std::string job;
  uint32_t rank = 0;
  uint32_t world = 1;
  uint64_t step = 0;
  uint64_t serial = 0;
};

struct Receipt {
  uint64_t sequence = 0;
  uint32_t slot = 0;
  uint64_t bytes = 0;  // of payload
  double seconds = 0;
  double stalled_seconds = 0;  // of these, waiting for a slot and for memory of the pool
  bool registered = false;     // false: the floor rose above it meanwhile
};

struct Entry {
  Registered registered;
  uint32_t slot = 0;
  std::optional<SlotHeader> header;  // none: damaged
};

class Store {
 public:
  struct Snapshot {
    SlotHeader header;
    Tables tables;
  };
  // How far a payload has been read.
  struct Stream {
    Snapshot snapshot;
    uint64_t offset = 0;
    size_t unit = 0;
    bool inside = false;  // of that unit: its digest has begun
    UnitDigest digest{};
    AlignedMemory memory{};
  };

  // Writes an empty store.  The storage's content is lost; it must be large enough.
  static void format(Storage& storage, const Geometry& geometry);
  // The room that extents of these sizes take in a slot.  Throws StoreError if no slot can hold them.
  static uint64_t needed_slot_bytes(const std::vector<uint64_t>& extents, uint64_t chunk_bytes);
  // The same of these contents.
  static uint64_t needed_slot_bytes(const Contents& contents, uint64_t chunk_bytes);

  // Writes nothing.  `lock` is let go when the store is closed.
  Store(std::unique_ptr<Storage> storage, const StoreOptions& options, std::shared_ptr<void> lock = nullptr);
  ~Store();

  // A digest that is not 0 is written as it is: content that is not of it will be found by whoever reads it.
  // `deadline` (replay::now_ns()) bounds the wait for a slot.  Throws StoreFull at the deadline, StoreError,
  // StorageError, and what the contents throw.
  Receipt persist(const Identity& identity, const Contents& contents, uint32_t threads, uint64_t deadline);
  // All ranks have `serial`: frees slots below it, durably, but for the newest one's.
  void release_before(uint64_t serial);
  // `serial` will not be complete on all ranks: frees its slot, durably.
  void discard(uint64_t serial);

  std::vector<Entry> snapshots() const;  // newest first
  std::vector<Extent> extents(uint64_t sequence) const;
  // `bytes` must be those of the extent.
  void read(uint64_t sequence, uint64_t extent, uint8_t* to, uint64_t bytes) const;
  // All extents at once, each into memory of its size (`offset` is not looked at).  What small extents have
  // in common is read and checked once.
  void read_all(uint64_t sequence, std::vector<Piece> into) const;
  // Some extents, to offsets of an area.  `in_place`: without a copy; what lies between those that follow one
  // another there as in the payload is anything afterwards.
  void read_into(uint64_t sequence, const std::vector<std::pair<uint64_t, uint64_t>>& extents, uint8_t* area,
                 uint64_t bytes, bool in_place) const;
  // Digest of each extent's content; 0 where the store has none.
  std::vector<uint64_t> digests(uint64_t sequence) const;
  // The payload from its beginning to its end, zeros between extents.
  Stream stream(uint64_t sequence) const;
  // The next bytes of it.  Throws StoreError at the latest with the last byte of what is damaged.
  void read_on(Stream& stream, uint8_t* to, uint64_t bytes) const;
  // Chunks that are damaged; extents, where these have digests.
  std::vector<uint64_t> verify(uint64_t sequence) const;

  Registry registry() const;
  uint32_t free_slots() const;
  const Geometry& geometry() const { return geometry_; }
  const Uuid& uuid() const { return like_.uuid; }
  const std::string& engine() const { return engine_; }
  const std::string& note() const { return note_; }  // what is wrong but did not keep it from opening

  // Waits for calls under way; those that wait for a slot fail.  Everything after it fails.
  void close();

 private:
  class Call;  // one that is under way; close() waits for it

  void write_blocks(std::unique_ptr<Writer>& writer, const std::vector<Block>& blocks);
  void write_superblock(std::unique_ptr<Writer>& writer, const Registry& registry, bool durable);
  void sync_slot(uint64_t begun, uint32_t slot);
  void settle_opening();
  void write_snapshot(std::unique_ptr<Writer>& writer, SlotHeader& header, const Contents& contents,
                      uint32_t threads, Receipt& receipt);
  // Its payload with tables and header, all at once, or what `contents` has digests of chunks for.
  std::vector<uint8_t> tables_of(const Contents& contents, const std::vector<uint64_t>& chunks) const;
  void seal(SlotHeader& header, const Contents& contents, const std::vector<uint8_t>& tables) const;
  void check_request(const Identity& identity, const Contents& contents, uint32_t threads) const;
  Registry current_registry() const;
  std::string adopt(StoreFacts& facts) const;
  Snapshot find(uint64_t sequence) const;
  Place place() const { return {*storage_, geometry_, like_.uuid}; }

  std::shared_ptr<void> lock_;
  std::unique_ptr<Storage> storage_;
  const StoreOptions options_;
  Superblock like_{};  // what does not change
  Geometry geometry_;
  std::string name_;
  std::string note_;
  std::string engine_;
  bool newer_headers_count_ = false;
  bool lazy_ = false;  // superblocks become durable with a later sync
  Durability durability_;
  std::atomic<uint64_t> superblock_begun_{0};  // durability_'s answer before the last one was written
  std::mutex opening_mutex_;
  bool opening_is_durable_ = false;  // what a writer that died has written
  mutable std::mutex judged_mutex_;
  mutable Judged judged_;
  std::optional<SlotTable<RealPlatform>> slots_;  // writable
  std::optional<ChunkPool> pool_;                 // writable

  mutable std::mutex calls_mutex_;
  mutable std::condition_variable last_call_;
  mutable uint64_t calls_ = 0;
  bool closing_ = false;
};

// One that is under way.
class Store::Call {
 public:
  explicit Call(const Store& store) : store_(store) {
    const std::lock_guard lock(store_.calls_mutex_);
    if (store_.closing_) throw StoreError("the store is closed");
    store_.calls_++;
  }
  ~Call() {
    const std::lock_guard lock(store_.calls_mutex_);
    if (--store_.calls_ == 0) store_.last_call_.notify_all();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  const Store& store_;
};

}  // namespace understudy::persistence
