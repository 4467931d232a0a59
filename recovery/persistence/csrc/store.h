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
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "recovery/persistence/csrc/chunk_pool.h"
#include "recovery/persistence/csrc/durability.h"
#include "recovery/persistence/csrc/slot_table.h"
#include "recovery/persistence/csrc/snapshot_reader.h"
#include "recovery/persistence/csrc/source.h"
#include "recovery/persistence/csrc/storage.h"
#include "recovery/persistence/csrc/superblocks.h"

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
  // Writes an empty store.  The storage's content is lost; it must be large enough.
  static void format(Storage& storage, const Geometry& geometry);
  // The room that extents of these sizes take in a slot.  Throws StoreError if no slot can hold them.
  static uint64_t needed_slot_bytes(const std::vector<uint64_t>& extents, uint64_t chunk_bytes);
  // Lays extents out in a payload, in their order; only kind, id and bytes are read.
  static void lay_out(std::vector<Extent>& extents);

  // Writes nothing.  `lock` is let go when the store is closed.
  Store(std::unique_ptr<Storage> storage, const StoreOptions& options, std::shared_ptr<void> lock = nullptr);
  ~Store();

  // `extents` laid out, as the source has them.  `deadline` (replay::now_ns()) bounds the wait for a slot.
  // Throws StoreFull at the deadline, StoreError, StorageError, and what the source throws.
  Receipt persist(const Identity& identity, const std::vector<Extent>& extents, const Source& source,
                  uint32_t threads, uint64_t deadline);
  // All ranks have `serial`: frees slots below it, durably, but for the newest one's.
  void release_before(uint64_t serial);
  // `serial` will not be complete on all ranks: frees its slot, durably.
  void discard(uint64_t serial);

  std::vector<Entry> snapshots() const;  // newest first
  std::vector<Extent> extents(uint64_t sequence) const;
  // `bytes` must be those of the extent.
  void read(uint64_t sequence, uint64_t extent, uint8_t* to, uint64_t bytes) const;
  // All extents at once, each into memory of its size (`offset` is not looked at).  What small extents have
  // in common, tables and chunks, is read and checked once.
  void read_all(uint64_t sequence, std::vector<Piece> into) const;
  // Bytes of the payload from an offset in it on, whatever extents they belong to.
  void read_range(uint64_t sequence, uint64_t offset, uint8_t* to, uint64_t bytes) const;
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
  struct Snapshot {
    SlotHeader header;
    Tables tables;
  };

  struct Block {
    uint64_t offset;
    const void* data;
    uint64_t bytes;  // rounded up to whole blocks, the rest zeros
  };
  void write_blocks(std::unique_ptr<Writer>& writer, std::initializer_list<Block> blocks);
  void write_superblock(std::unique_ptr<Writer>& writer, const Registry& registry, bool durable);
  void sync_slot(uint64_t begun, uint32_t slot);
  void settle_opening();
  void write_snapshot(std::unique_ptr<Writer>& writer, SlotHeader& header, const std::vector<Extent>& extents,
                      const Source& source, uint32_t threads, Receipt& receipt);
  void check_request(const Identity& identity, const std::vector<Extent>& extents, const Source& source,
                     uint32_t threads) const;
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

}  // namespace understudy::persistence
