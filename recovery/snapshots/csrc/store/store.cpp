#include "recovery/snapshots/csrc/store/store.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace understudy::persistence {
namespace {

uint64_t wall_clock_ns() {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(since_epoch).count());
}

double seconds_since(uint64_t begin_ns) { return static_cast<double>(replay::now_ns() - begin_ns) * 1e-9; }

// Blocks with memory for them, the rest of the last one zeros.
struct OwnedBlock {
  OwnedBlock(uint64_t at, const void* data, uint64_t count)
      : offset(at), bytes(rounded_up(count, kBlock)), memory(aligned_memory(bytes)) {
    if (count != 0) std::memcpy(memory.get(), data, count);
    std::memset(memory.get() + count, 0, bytes - count);
  }
  operator Block() const { return {offset, memory.get(), bytes}; }

  uint64_t offset, bytes;
  AlignedMemory memory;
};

// What a slot needs, whether extents have digests or chunks.
uint64_t needed_for(uint64_t payload, uint64_t extents, uint64_t chunk_bytes) {
  if (extents > kMostExtents)
    throw StoreError("a snapshot has at most 2^22 extents, not " + std::to_string(extents));
  Geometry geometry{kFewestSlots, kBlock, std::max(chunk_bytes, kBlock)};
  geometry.slot_bytes = std::max(geometry.room_for(payload, extents), kBlock);
  geometry.chunk_bytes = chunk_bytes;
  if (const std::string wrong = geometry.wrong(); !wrong.empty()) throw StoreError(wrong);
  return geometry.slot_bytes;
}

// Whatever the caller does next with the memory: the write has ended.
void write_and_wait(Writer& writer, uint64_t offset, const uint8_t* data, uint64_t bytes) {
  writer.submit(offset, data, bytes, 0);
  writer.wait();
}

}  // namespace

void Store::close() {
  std::unique_lock lock(calls_mutex_);
  closing_ = true;
  if (slots_) slots_->stop();
  last_call_.wait(lock, [this] { return calls_ == 0; });
  storage_.reset();
  pool_.reset();
  lock_.reset();
}

Store::~Store() { close(); }

// ---------------------------------------------------------------- making and opening
void Store::format(Storage& storage, const Geometry& geometry) {
  if (const std::string wrong = geometry.wrong(); !wrong.empty()) throw StoreError(wrong);
  if (storage.bytes() < geometry.store_bytes())
    throw StoreError(storage.name() + " has " + std::to_string(storage.bytes()) +
                     " bytes, and the store needs " + std::to_string(geometry.store_bytes()));
  Registry registry;
  registry.slots.resize(geometry.slots);
  const Superblock like = new_superblock(geometry);
  const AlignedMemory memory = aligned_memory(kBlock);
  const std::unique_ptr<Writer> writer = storage.writer();
  for (registry.epoch = 1; registry.epoch <= 2; registry.epoch++) {
    const Superblock block = sealed(like, registry);
    std::memcpy(memory.get(), &block, sizeof block);
    write_and_wait(*writer, superblock_offset(registry.epoch), memory.get(), kBlock);
  }
  storage.sync();
}

Store::Store(std::unique_ptr<Storage> storage, const StoreOptions& options, std::shared_ptr<void> lock)
    : lock_(std::move(lock)), storage_(std::move(storage)), options_(options), durability_(*storage_) {
  StoreFacts facts = read_superblocks(*storage_, options_.exact);
  like_ = facts.block;
  geometry_ = facts.geometry;
  name_ = storage_->name();
  note_ = std::move(facts.note);
  newer_headers_count_ = facts.newer_headers_count;
  const std::string adopted = adopt(facts);
  if (!note_.empty()) note_ += adopted;
  engine_ = storage_->engine();
  if (!options_.writable) return;
  const uint64_t chunks = std::min<uint64_t>(options_.pool_bytes / geometry_.chunk_bytes, 1u << 20);
  if (chunks == 0)
    throw StoreError("a pool of " + std::to_string(options_.pool_bytes) + " bytes cannot hold one chunk of " +
                     std::to_string(geometry_.chunk_bytes) + ": raise pool_bytes");
  // A crash may have left a whole snapshot that was never registered.  No other one may take its sequence.
  uint64_t last_sequence = facts.registry.latest_sequence;
  for (uint32_t slot = 0; slot < geometry_.slots; slot++) {
    const Registered& row = facts.registry.slots[slot];
    if (row.sequence == 0) last_sequence = std::max(last_sequence, row.serial);
    if (const auto header = read_header(place(), slot))
      last_sequence = std::max(last_sequence, header->sequence);
  }
  lazy_ = newer_headers_count_ && !storage_->syncs_ranges();
  slots_.emplace(std::move(facts.registry), last_sequence, lazy_);
  pool_.emplace(geometry_.chunk_bytes, static_cast<uint32_t>(chunks));
}

// ---------------------------------------------------------------- writing
void Store::write_blocks(std::unique_ptr<Writer>& writer, const std::vector<Block>& blocks) {
  try {
    if (!writer) writer = storage_->writer();
    uint32_t under_way = 0;
    for (const Block& block : blocks) {
      for (; under_way >= std::max(writer->depth(), 1u); under_way--) writer->wait();
      writer->submit(block.offset, block.data, block.bytes, 0);
      under_way++;
    }
    for (; under_way != 0; under_way--) writer->wait();
  } catch (...) {
    writer.reset();  // before the memory goes: the writes have ended then
    throw;
  }
}

void Store::write_superblock(std::unique_ptr<Writer>& writer, const Registry& registry, bool durable) {
  const uint64_t begun = durability_.begin();
  superblock_begun_.store(begun, std::memory_order_release);
  const Superblock block = sealed(like_, registry);
  const OwnedBlock owned(superblock_offset(registry.epoch), &block, sizeof block);
  write_blocks(writer, {owned});
  if (durable) durability_.sync(begun, superblock_offset(registry.epoch), kBlock);
}

// What has been written to a slot since `begun` is durable after it, and so is the superblock before.
void Store::sync_slot(uint64_t begun, uint32_t slot) {
  if (!lazy_) return durability_.sync(begun, geometry_.header_offset(slot), geometry_.stride());
  const uint64_t written = slots_->written();
  const uint64_t superblock_begun = superblock_begun_.load(std::memory_order_acquire);
  durability_.sync(begun, 0, geometry_.store_bytes());
  // Had a sync failed since that superblock was written, this one would say nothing about it.
  if (durability_.begin() == superblock_begun) slots_->made_durable(written);
}

// A writer that was killed may have left a superblock that no sync followed.  Before anything is changed that
// an older one names, it has to be durable.
void Store::settle_opening() {
  if (!newer_headers_count_) return;
  const std::lock_guard lock(opening_mutex_);
  if (!opening_is_durable_) durability_.sync(durability_.begin(), 0, geometry_.store_bytes());
  opening_is_durable_ = true;
}

uint64_t Store::needed_slot_bytes(const std::vector<uint64_t>& extents, uint64_t chunk_bytes) {
  constexpr uint64_t kMost = 1ull << 53;
  uint64_t end = 0;
  for (const uint64_t bytes : extents) {
    end = rounded_up(end, kExtentAlignment) + std::min(bytes, kMost);
    if (end >= kMost) throw StoreError("a snapshot of more than eight pebibytes fits no slot");
  }
  return needed_for(end, extents.size(), chunk_bytes);
}

uint64_t Store::needed_slot_bytes(const Contents& contents, uint64_t chunk_bytes) {
  return needed_for(contents.bytes(), contents.extents().size(), chunk_bytes);
}

void Store::check_request(const Identity& identity, const Contents& contents, uint32_t threads) const {
  const std::vector<Extent>& extents = contents.extents();
  if (!slots_) throw StoreError(name_ + " was opened for reading only");
  if (identity.job.size() > kMostJobBytes)
    throw StoreError("the name of a job has at most 255 bytes, not " + std::to_string(identity.job.size()));
  if (identity.rank >= identity.world)
    throw StoreError("there is no rank " + std::to_string(identity.rank) + " in a world of " +
                     std::to_string(identity.world));
  if (threads == 0 || threads > 256)
    throw StoreError("a snapshot is written by 1 to 256 threads, not " + std::to_string(threads));
  for (const Extent& e : extents)
    if (e.kind < kDeviceBuffer || e.kind > kElsewhere)
      throw StoreError("there is no kind " + std::to_string(e.kind) + " of extent");
  if (extents.size() > kMostExtents)
    throw StoreError("a snapshot has at most 2^22 extents, not " + std::to_string(extents.size()));
  if (contents.bytes() > geometry_.slot_bytes ||
      geometry_.room_for(contents.bytes(), extents.size()) > geometry_.slot_bytes)
    throw StoreError("a snapshot of " + std::to_string(contents.bytes()) + " bytes in " +
                     std::to_string(extents.size()) + " extents does not fit a slot of " +
                     std::to_string(geometry_.slot_bytes) + " bytes in " + name_ +
                     ": create a store with larger slots");
}

Receipt Store::persist(const Identity& identity, const Contents& contents, uint32_t threads,
                       uint64_t deadline) {
  const Call call(*this);
  check_request(identity, contents, threads);
  const uint64_t begin = replay::now_ns();
  std::unique_ptr<Writer> writer;
  const auto write = [&](const Registry& registry, bool durable) {
    write_superblock(writer, registry, durable);
  };
  if (slots_->below_floor(identity.serial))
    throw StoreError(
        "serial " + std::to_string(identity.serial) + " lies below the floor of " + name_ +
        ": newer snapshots are complete on all ranks; go on counting from there, or create a new store");
  if (slots_->last_sequence() >= kMostCounted)
    throw StoreError(name_ + " is damaged: its sequences have no end");
  settle_opening();
  const std::optional<uint32_t> slot = slots_->acquire(deadline, write);
  if (!slot && slots_->stopped()) throw StoreError("the store is closed");
  if (!slot)
    throw StoreFull(
        "no slot of " + name_ + " became free in time: " + std::to_string(geometry_.slots) +
        " slots hold snapshots that are needed or under way; release older ones, persist less often, or "
        "create a store with more slots");
  // Only now: so a later header of a slot has the larger sequence, and what is known of the slot stays below
  // it.
  const Registered snapshot{slots_->next_sequence(), identity.serial};
  Receipt receipt{snapshot.sequence, *slot, contents.bytes(), 0, seconds_since(begin), false};
  try {
    SlotHeader header{};
    header.slot = *slot;
    header.sequence = snapshot.sequence;
    header.serial = snapshot.serial;
    header.step = identity.step;
    header.rank = identity.rank;
    header.world = identity.world;
    header.job_bytes = static_cast<uint32_t>(identity.job.size());
    std::memcpy(header.job, identity.job.data(), identity.job.size());
    write_snapshot(writer, header, contents, threads, receipt);
  } catch (...) {
    writer.reset();  // nothing is under way to the slot after this
    slots_->give_back(*slot, snapshot.sequence);
    throw;
  }
  receipt.registered = slots_->commit(*slot, snapshot, write);
  receipt.seconds = seconds_since(begin);
  return receipt;
}

std::vector<uint8_t> Store::tables_of(const Contents& contents, const std::vector<uint64_t>& chunks) const {
  const std::vector<Extent>& extents = contents.extents();
  const uint64_t row = geometry_.row_bytes();
  std::vector<uint8_t> tables(geometry_.tables_bytes(extents.size(), contents.bytes()));
  for (size_t i = 0; i < extents.size(); i++) {
    Extent extent = extents[i];
    if (geometry_.extents_have_digests && extent.digest == 0)
      extent.digest = contents.digest(extent.offset, extent.bytes);
    std::memcpy(tables.data() + i * row, &extent, row);
  }
  if (!chunks.empty())
    std::memcpy(tables.data() + extents.size() * row, chunks.data(), chunks.size() * sizeof(uint64_t));
  return tables;
}

void Store::seal(SlotHeader& header, const Contents& contents, const std::vector<uint8_t>& tables) const {
  header.magic = kSlotMagic;
  header.version = kStoreVersion;
  header.uuid = like_.uuid;
  header.time_ns = wall_clock_ns();
  header.payload_bytes = contents.bytes();
  header.chunk_bytes = geometry_.chunk_bytes;
  header.extents = contents.extents().size();
  header.chunks = geometry_.chunks(contents.bytes());
  header.tables_digest = replay::digest(tables.data(), tables.size());
  header.checksum = checksum_of(header);
}

void Store::write_snapshot(std::unique_ptr<Writer>& writer, SlotHeader& header, const Contents& contents,
                           uint32_t threads, Receipt& receipt) {
  const uint64_t begun = durability_.begin();
  const uint64_t payload = geometry_.payload_offset(header.slot);
  const uint64_t behind = payload + rounded_up(contents.bytes(), kBlock);
  const uint64_t front = geometry_.header_offset(header.slot);
  if (!writer) writer = storage_->writer();
  Payload what{contents, payload, geometry_.chunk_bytes, !geometry_.extents_have_digests, {}};
  const auto write = [&] {
    const Written written = write_payload(*storage_, writer, *pool_, what, threads);
    receipt.stalled_seconds += written.stalled_seconds;
    contents.confirm();
    return written.digests;
  };
  if (geometry_.extents_have_digests) {  // nothing has to wait for digests
    const std::vector<uint8_t> tables = tables_of(contents, {});
    seal(header, contents, tables);
    const OwnedBlock first(front, &header, sizeof header), last(behind, tables.data(), tables.size());
    what.also = {first};
    if (last.bytes != 0) what.also.push_back(last);
    write();
  } else {
    const std::vector<uint8_t> tables = tables_of(contents, write());
    seal(header, contents, tables);
    const OwnedBlock first(front, &header, sizeof header), last(behind, tables.data(), tables.size());
    write_blocks(writer, last.bytes != 0 ? std::vector<Block>{last, first} : std::vector<Block>{first});
  }
  sync_slot(begun, header.slot);
}

void Store::release_before(uint64_t serial) {
  const Call call(*this);
  if (!slots_) throw StoreError(name_ + " was opened for reading only");
  settle_opening();
  std::unique_ptr<Writer> writer;
  slots_->release_before(
      serial, [&](const Registry& registry, bool durable) { write_superblock(writer, registry, durable); });
}

void Store::discard(uint64_t serial) {
  const Call call(*this);
  if (!slots_) throw StoreError(name_ + " was opened for reading only");
  settle_opening();
  std::unique_ptr<Writer> writer;
  slots_->discard(
      serial, [&](const Registry& registry, bool durable) { write_superblock(writer, registry, durable); });
}

}  // namespace understudy::persistence
