#include "proxy_server/csrc/snapshots.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "replay/csrc/digest.h"
#include "replay/csrc/futex.h"

namespace understudy::server {

using replay::CommitEntry;
using replay::LogError;
using replay::Manifest;
using replay::SnapshotEntry;

Snapshots::Snapshots(const Driver& driver, replay::LogMap& log, BufferTable& table)
    : driver_(driver), log_(log), table_(table), area_(log.snapshots()) {
  table_.set_capture(this);
  adopt();
}

// What a server that died has published is as good as our own.
void Snapshots::adopt() {
  struct Usable {
    uint64_t serial;
    CommitEntry commit;
    Manifest manifest;
  };
  std::vector<Usable> usable;
  usable.reserve(replay::kSnapshots);
  std::vector<ShadowArea::Published> published;
  for (SnapshotEntry& e : log_.page().snapshots) {
    const uint64_t serial = e.serial.load(std::memory_order_acquire);
    if (serial == 0) continue;
    try {
      const CommitEntry commit = replay::copy_once(e.commit);
      const Usable& taken = usable.emplace_back(serial, commit, manifest(commit));
      published.push_back({&taken.manifest, &taken.commit, serial});
    } catch (const LogError& error) {
      std::fprintf(stderr, "understudy: rank %u: a snapshot cannot be used: %s\n", log_.page().rank,
                   error.what());
      e.serial.store(0);
    }
  }
  area_.adopt(published);
  forget_unfinished();
}

// A replay that comes by the same commit again takes an order up again that was not fulfilled.
// One below the floor was: it is on storage, and its memory was given back.
void Snapshots::forget_unfinished() {
  const uint64_t needed = log_.page().snapshot_floor.load();
  const uint64_t settled = std::max<uint64_t>(needed, 1) - 1;
  const uint64_t known = std::max({log_.page().snapshot_failed.load(), settled, newest()});
  log_.page().snapshot_begun.store(known, std::memory_order_release);
}

uint64_t Snapshots::ordered(uint64_t steps) const {
  if (suspended_) return 0;
  uint64_t newest = 0;
  for (const auto& place : log_.page().snapshot_orders) {
    const uint64_t order = place.load(std::memory_order_acquire), step = replay::step_of(order);
    if (step == steps || step == replay::kAtNextCommit) newest = std::max(newest, replay::serial_of(order));
  }
  return newest > begun() ? newest : 0;
}

void Snapshots::begin(uint64_t serial, const CommitEntry& commit, Manifest rest,
                      const std::vector<std::pair<uint64_t, at::Tensor>>& generators) {
  while (advance(~0ull)) {  // orders follow one another closely: what is left are buffers that never change
  }
  const uint64_t before = replay::now_ns();
  log_.page().snapshot_begun.store(serial, std::memory_order_release);
  making_.emplace(Making{serial, commit, std::move(rest), {}, 0, 0, 0});
  Making& m = *making_;
  for (const auto& [id, state] : generators) {
    const auto place = area_.allocate(state.nbytes(), m.serial);
    if (!place) return fail();
    std::memcpy(area_.at(*place), state.const_data_ptr(), state.nbytes());
    m.manifest.generators.push_back({id, state.nbytes(), *place});
  }
  m.manifest.buffers.reserve(table_.size());
  m.rows.reserve(table_.size());
  for (auto& [handle, b] : table_.buffers()) {
    m.manifest.buffers.push_back(
        {handle, b.content.nbytes(), 0, replay::kNotShadowed, b.available ? 1u : 2u});
    m.rows.push_back({handle, b.content.nbytes(), 0, b.version});
    if (b.available) b.captured = static_cast<uint32_t>(m.rows.size());
  }
  m.nanoseconds += replay::now_ns() - before;
}

bool Snapshots::advance(uint64_t bytes) {
  if (!making_) return false;
  const uint64_t before = replay::now_ns();
  // Small buffers cost more than their bytes say.
  constexpr uint64_t kEach = 4096;
  for (uint64_t done = 0; making_ && done < bytes && making_->next < making_->rows.size(); done += kEach) {
    const Row& row = making_->rows[making_->next];
    BufferTable::Buffer* b = table_.find(row.handle);
    if (b == nullptr || b->captured != making_->next + 1) {
      making_->next++;  // copied before it changed, or without content
      continue;
    }
    const uint64_t portion = std::min(row.bytes - row.done, bytes - done);
    if (copy(making_->next, portion)) {
      b->captured = 0;
      making_->next++;
    }
    done += portion;
  }
  if (!making_) return false;
  making_->nanoseconds += replay::now_ns() - before;
  if (making_->next < making_->rows.size()) return true;
  publish();
  return false;
}

void Snapshots::before_change(uint64_t, uint32_t captured) {
  if (!making_) return;
  const uint64_t before = replay::now_ns();
  copy(captured - 1, ~0ull);
  if (making_) making_->nanoseconds += replay::now_ns() - before;
}

// Copies up to `limit` bytes of a row's buffer; whether all of it is copied now. Fails the snapshot if there
// is no memory for it.
bool Snapshots::copy(size_t index, uint64_t limit) {
  Making& m = *making_;
  Row& row = m.rows[index];
  replay::ManifestBuffer& kept = m.manifest.buffers[index];
  BufferTable::Buffer* b = table_.find(row.handle);
  if (b == nullptr || b->version != row.version || b->content.nbytes() != row.bytes)
    throw LogError("a buffer changed before its snapshot was taken");
  if (kept.shadow_offset == replay::kNotShadowed) {
    if (b->snapshot_version == b->version) {  // the snapshot before has it already
      area_.keep(b->snapshot_offset, m.serial);
      kept.shadow_offset = b->snapshot_offset;
      row.done = row.bytes;
    } else if (const auto place = area_.allocate(row.bytes, m.serial)) {
      kept.shadow_offset = *place;
    } else {
      fail();
      return false;
    }
  }
  const uint64_t portion = std::min(limit, row.bytes - row.done);
  driver_.to_host(b->content, row.done, portion, area_.at(kept.shadow_offset) + row.done);
  row.done += portion;
  m.copied += portion;
  if (row.done < row.bytes) return false;
  if (b->digest_version != b->version) {
    b->digest = replay::digest(area_.at(kept.shadow_offset), row.bytes);
    b->digest_version = b->version;
  }
  kept.digest = b->digest;
  b->snapshot_version = b->version;
  b->snapshot_offset = kept.shadow_offset;
  return true;
}

void Snapshots::publish() {
  Making& m = *making_;
  const auto place = area_.allocate(m.manifest.encoded_bytes(), m.serial);
  if (!place) return fail();
  m.manifest.encode(area_.at(*place));
  m.commit.manifest_offset = *place;
  m.commit.manifest_bytes = m.manifest.encoded_bytes();
  m.commit.flags |= replay::kCommitComplete;
  unpublish(floor(), leases(), true);
  SnapshotEntry* const slot = std::find_if(std::begin(log_.page().snapshots), std::end(log_.page().snapshots),
                                           [](const SnapshotEntry& e) { return e.serial.load() == 0; });
  if (slot == std::end(log_.page().snapshots)) return fail();  // only if somebody wrote into the page
  slot->bytes = m.copied;
  slot->nanoseconds = m.nanoseconds;
  slot->commit = m.commit;
  slot->serial.store(m.serial, std::memory_order_release);
  log_.page().snapshots_taken.fetch_add(1, std::memory_order_relaxed);
  log_.page().snapshot_ns.fetch_add(m.nanoseconds, std::memory_order_relaxed);
  making_.reset();
  log_.page().snapshot_used_bytes.store(area_.used(), std::memory_order_relaxed);
}

void Snapshots::fail() {
  log_.page().snapshot_failed.store(making_->serial, std::memory_order_release);
  abandon();
  if (!failed_before_)
    std::fprintf(stderr, "understudy: there is no memory for a snapshot of rank %u (limit %llu MiB)\n",
                 log_.page().rank, static_cast<unsigned long long>(area_.area().bytes >> 20));
  failed_before_ = true;
}

void Snapshots::abandon() {
  if (!making_) return;
  for (const Row& row : making_->rows)
    if (BufferTable::Buffer* b = table_.find(row.handle)) {
      b->captured = 0;
      // Blocks of an unpublished snapshot go; those it shares with the one before stay, and still hold this.
      if (row.done == row.bytes && b->version == row.version) b->snapshot_version = ~0ull;
    }
  area_.rewind(making_->serial - 1);
  making_.reset();
  forget_unfinished();
}

bool Snapshots::holds(uint64_t commit) const {
  for (const SnapshotEntry& e : log_.page().snapshots)
    if (e.serial.load() != 0 && e.commit.number == commit) return true;
  return false;
}

CommitEntry Snapshots::entry(uint64_t commit) const {
  const SnapshotEntry* newest = nullptr;
  for (const SnapshotEntry& e : log_.page().snapshots)
    if (e.serial.load() != 0 && e.commit.number == commit)
      if (newest == nullptr || e.serial.load() > newest->serial.load()) newest = &e;
  if (newest == nullptr) throw LogError("there is no snapshot of commit " + std::to_string(commit));
  return replay::copy_once(newest->commit);
}

Manifest Snapshots::manifest(const CommitEntry& entry) const { return Manifest::read(area_.area(), entry); }

uint64_t Snapshots::newest() const {
  uint64_t newest = 0;
  for (const SnapshotEntry& e : log_.page().snapshots) newest = std::max(newest, e.serial.load());
  return newest;
}

uint64_t Snapshots::floor() const {
  const uint64_t needed = log_.page().snapshot_floor.load(std::memory_order_acquire);
  return log_.page().world > 1 ? needed : std::max(needed, newest());
}

void Snapshots::forget_contents() {
  area_.clear();
  for (auto& [handle, b] : table_.buffers()) b.snapshot_version = ~0ull;
}

void Snapshots::apply_floor() {
  auto& page = log_.page();
  if (area_.area().bytes == 0) return;
  const bool suspended = page.snapshot_suspended.load(std::memory_order_acquire) != 0;
  if (suspended && !suspended_) {
    cut(~0ull);
    forget_contents();
  }
  suspended_ = suspended;
  const Leases leased = leases();
  // One that is being made shares blocks with the newest, wherever the floor is.
  const uint64_t needed = making_ ? std::min(floor(), newest()) : floor();
  if (needed > released_ || leased != leased_) {
    unpublish(needed, leased, false);
    area_.release(needed, leased);
    if (newest() == 0 && !making_) forget_contents();
    released_ = needed;
    leased_ = leased;
  }
  page.snapshot_used_bytes.store(area_.used(), std::memory_order_relaxed);
}

Snapshots::Leases Snapshots::leases() const {
  Leases leased;
  for (size_t i = 0; i < leased.size(); i++)
    leased[i] = log_.page().snapshot_leases[i].load(std::memory_order_acquire);
  return leased;
}

void Snapshots::unpublish(uint64_t floor, const Leases& leased, bool newer) {
  for (SnapshotEntry& e : log_.page().snapshots) {
    const uint64_t serial = e.serial.load(std::memory_order_relaxed);
    const bool wanted = serial == floor || (serial > floor && !newer) ||
                        std::find(leased.begin(), leased.end(), serial) != leased.end();
    if (!wanted) e.serial.store(0, std::memory_order_release);
  }
  // Whoever has read bytes of another snapshot at its place also sees that it is gone (snapshot_holds).
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

uint64_t Snapshots::keeps_log_from() const {
  const auto& page = log_.page();
  if (!enabled()) return ~0ull;
  const uint64_t needed = floor();
  if (needed == 0 && beginning_ && page.freed_segments.load(std::memory_order_relaxed) == 0) return 0;
  uint64_t from = making_ ? making_->commit.log_offset : ~0ull;
  for (const SnapshotEntry& e : page.snapshots)
    if (const uint64_t serial = e.serial.load(); serial != 0 && serial >= needed)
      from = std::min(from, e.commit.log_offset);
  for (const auto* wanted : {&page.log_kept_from, &page.log_uncopied_from}) {
    const uint64_t stored = wanted->load(std::memory_order_acquire);
    const bool reaches = stored / log_.segment_bytes() >= page.freed_segments.load(std::memory_order_relaxed);
    if (stored != 0 && stored >= unkept_ && reaches) from = std::min(from, stored);
  }
  return from;
}

void Snapshots::cut(uint64_t offset) {
  beginning_ = false;
  if (making_ && making_->commit.log_offset < offset) abandon();
  for (SnapshotEntry& e : log_.page().snapshots)
    if (e.commit.log_offset < offset) e.serial.store(0, std::memory_order_release);
}

}  // namespace understudy::server
