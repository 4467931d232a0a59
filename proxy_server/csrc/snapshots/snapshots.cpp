#include "proxy_server/csrc/snapshots/snapshots.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "proxy_server/csrc/snapshots/side_copies.h"
#include "replay/csrc/digest/digest.h"
#include "replay/csrc/log/futex.h"

namespace understudy::server {

using replay::CommitEntry;
using replay::CommitRow;
using replay::LogError;
using replay::Manifest;
using replay::SnapshotEntry;

Snapshots::Snapshots(const Driver& driver, replay::LogMap& log, BufferTable& table)
    : driver_(driver),
      log_(log),
      table_(table),
      area_(log.snapshots()),
      // An executor that sleeps publishes what is whole; otherwise it looks now and then.
      copier_([page = log.server_page()] {
        page.shared().tail_futex.fetch_add(1);
        replay::futex_wake(page.shared().tail_futex);
      }) {
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
  for (SnapshotEntry& e : page().server().snapshots) {
    const uint64_t serial = e.serial.load(std::memory_order_acquire);
    if (serial == 0) continue;
    try {
      const CommitEntry commit = replay::copy_once(e.commit);
      const Usable& taken = usable.emplace_back(serial, commit, manifest(commit));
      published.push_back({&taken.manifest, &taken.commit, serial});
    } catch (const LogError& error) {
      std::fprintf(stderr, "understudy: rank %u: a snapshot cannot be used: %s\n", page().fixed().rank,
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
  const uint64_t needed = page().daemon().snapshot_floor.load();
  const uint64_t settled = std::max<uint64_t>(needed, 1) - 1;
  const uint64_t known = std::max({page().server().snapshot_failed.load(), settled, newest()});
  page().server().snapshot_begun.store(known, std::memory_order_release);
}

uint64_t Snapshots::ordered(uint64_t steps) const {
  if (suspended_) return 0;
  uint64_t newest = 0;
  for (const auto& place : page().daemon().snapshot_orders) {
    const uint64_t order = place.load(std::memory_order_acquire), step = replay::step_of(order);
    if (step == steps || step == replay::kAtNextCommit) newest = std::max(newest, replay::serial_of(order));
  }
  return newest > begun() ? newest : 0;
}

bool Snapshots::awaited() const {
  const auto& orders = page().daemon().snapshot_orders;
  return std::any_of(std::begin(orders), std::end(orders), [this](const auto& place) {
    return replay::serial_of(place.load(std::memory_order_acquire)) > begun();
  });
}

void Snapshots::begin(uint64_t serial, CommitRow commit, Manifest rest,
                      const std::vector<std::pair<uint64_t, at::Tensor>>& generators) {
  finish();       // orders follow one another closely: what is left are buffers that never change
  apply_floor();  // first, as all of its memory is taken now
  if (suspended_) return;
  const uint64_t before = replay::now_ns();
  page().server().snapshot_begun.store(serial, std::memory_order_release);
  making_.emplace(Making{serial, std::move(commit), std::move(rest), {}, nullptr});
  Making& m = *making_;
  for (const auto& [id, state] : generators) {
    const auto place = area_.allocate(state.nbytes(), m.serial);
    if (!place) return fail();
    std::memcpy(area_.at(*place), state.const_data_ptr(), state.nbytes());
    m.manifest.generators.push_back({id, state.nbytes(), *place});
  }
  if (!list_buffers(m)) return fail();
  m.thread_began_ns = copier_.nanoseconds();
  m.threaded = copier_.start(m.list);
  m.nanoseconds += replay::now_ns() - before;
}

bool Snapshots::list_buffers(Making& m) {
  std::vector<CopyRow> copies;
  copies.reserve(table_.size());
  m.manifest.buffers.reserve(table_.size());
  m.rows.reserve(table_.size());
  for (auto& [handle, b] : table_.buffers()) {
    const uint64_t bytes = b.content.nbytes();
    m.rows.push_back({handle, b.version});
    auto& kept = m.manifest.buffers.emplace_back(handle, bytes, 0, replay::kNotShadowed, 1);
    CopyRow& copy = copies.emplace_back();
    if (!b.available) {
      kept.has_digest = 2;
      continue;
    }
    b.captured = static_cast<uint32_t>(m.rows.size());
    if (b.snapshot_version == b.version) {  // the snapshot before has it already
      area_.keep(b.snapshot_offset, m.serial);
      kept.shadow_offset = b.snapshot_offset;
    } else if (const auto place = area_.place(bytes, m.serial)) {
      kept.shadow_offset = *place;
      copy.copies = true;
      copy.fresh = !area_.backed(*place, bytes);
    } else {
      return false;
    }
    copy.bytes = bytes;
    copy.to = area_.at(kept.shadow_offset);
    copy.digests = b.digest_version != b.version;
    kept.digest = b.digest;
  }
  m.list = std::make_shared<CopyList>(std::move(copies), copy_to_host(m.rows), piece_bytes(), huge_pages());
  return true;
}

// For blocks that have no memory yet: huge pages cost a tenth of as many small ones, and storage is written
// from them as fast as it goes.  Done by the thread that copies; who copies besides gets small ones.
std::function<void()> Snapshots::huge_pages() const {
  const uint64_t begin = area_.backed_until() / replay::kHugePage * replay::kHugePage;
  const uint64_t end =
      std::min((area_.used_until() + replay::kHugePage / 2) / replay::kHugePage * replay::kHugePage,
               area_.area().bytes);
  if (begin >= end || area_.backed_until() >= area_.used_until()) return {};
  return [memory = area_.at(begin), bytes = end - begin, &known = page().shared().snapshot_huge_bytes] {
    known.fetch_add(replay::get_huge_pages(memory, bytes), std::memory_order_relaxed);
  };
}

// Any thread may copy: a buffer's memory stays where it is until before_change() or abandon().
CopyList::Copy Snapshots::copy_to_host(const std::vector<Row>& rows) const {
  struct Place {
    const uint8_t* memory;
    bool on_host;  // some results of a GPU's operators are
  };
  std::vector<Place> places;
  places.reserve(rows.size());
  for (const Row& row : rows) {
    const c10::Storage& storage = table_.find(row.handle)->content.storage();
    places.push_back({static_cast<const uint8_t*>(storage.data()), storage.device().is_cpu()});
  }
  std::shared_ptr<SideCopies> beside;
  if (!driver_.device().is_cpu())
    beside = std::make_shared<SideCopies>(driver_.streams().for_snapshots(), piece_bytes());
  return [places = std::move(places), beside](size_t row, uint64_t offset, uint64_t bytes, uint8_t* to) {
    const auto& [memory, on_host] = places[row];
    if (on_host)
      std::memcpy(to, memory + offset, bytes);
    else
      beside->copy(memory + offset, bytes, to);
  };
}

// On a GPU each piece is waited for.
uint64_t Snapshots::piece_bytes() const { return CopyList::kPiece * (driver_.device().is_cpu() ? 1 : 4); }

bool Snapshots::advance(uint64_t bytes) {
  if (!making_) return false;
  Making& m = *making_;
  if (!m.threaded) {
    const uint64_t before = replay::now_ns();
    const bool more = m.list->copy_some(bytes);
    if (!more) m.list->finish();
    m.nanoseconds += replay::now_ns() - before;
    if (more) return true;
  } else if (!m.list->finished()) {
    return false;
  }
  copier_.wait();
  if (m.list->failed())
    fail();
  else
    publish();
  return false;
}

void Snapshots::finish() {
  if (!making_) return;
  const uint64_t before = replay::now_ns();
  making_->list->copy_some(~0ull);
  copier_.wait();
  making_->nanoseconds += replay::now_ns() - before;
  advance(~0ull);
}

void Snapshots::before_change(uint64_t handle, uint32_t captured) {
  if (!making_) return;
  Making& m = *making_;
  check_unchanged(m.rows[captured - 1], *table_.find(handle));
  const uint64_t before = replay::now_ns();
  m.list->settle(captured - 1);
  m.nanoseconds += replay::now_ns() - before;
  if (m.list->failed()) fail();
}

void Snapshots::check_unchanged(const Row& row, const BufferTable::Buffer& buffer) const {
  if (buffer.version != row.version) throw LogError("a buffer changed before its snapshot was taken");
}

void Snapshots::publish() {
  Making& m = *making_;
  for (size_t i = 0; i < m.rows.size(); i++)
    if (const CopyRow& copied = m.list->rows()[i]; copied.digests)
      m.manifest.buffers[i].digest = copied.digest;
  area_.all_backed();
  const auto place = area_.allocate(m.manifest.encoded_bytes(), m.serial);
  if (!place) return fail();
  m.manifest.encode(area_.at(*place));
  m.commit.manifest_offset = *place;
  m.commit.manifest_bytes = m.manifest.encoded_bytes();
  m.commit.flags |= replay::kCommitComplete;
  unpublish(floor(), leases(), true);
  SnapshotEntry* const slot =
      std::find_if(std::begin(page().server().snapshots), std::end(page().server().snapshots),
                   [](const SnapshotEntry& e) { return e.serial.load() == 0; });
  if (slot == std::end(page().server().snapshots)) return fail();  // only if somebody wrote into the page
  if (!replay::write_more_marks(log_, row_of(slot), m.commit.more)) return fail();
  remember_copies();
  if (m.threaded) m.nanoseconds += copier_.nanoseconds() - m.thread_began_ns;
  slot->bytes = m.list->bytes();
  slot->nanoseconds = m.nanoseconds;
  slot->commit = m.commit;
  slot->serial.store(m.serial, std::memory_order_release);
  page().server().snapshots_taken.fetch_add(1, std::memory_order_relaxed);
  page().server().snapshot_ns.fetch_add(m.nanoseconds, std::memory_order_relaxed);
  making_.reset();
  page().server().snapshot_used_bytes.store(area_.used(), std::memory_order_relaxed);
}

// What has not changed since is not copied again.
void Snapshots::remember_copies() {
  for (size_t i = 0; i < making_->rows.size(); i++) {
    BufferTable::Buffer* b = table_.find(making_->rows[i].handle);
    if (b == nullptr || b->captured != i + 1) continue;  // it has changed, or another has its name now
    check_unchanged(making_->rows[i], *b);
    b->captured = 0;
    const auto& kept = making_->manifest.buffers[i];
    b->digest = kept.digest;
    b->digest_version = b->snapshot_version = b->version;
    b->snapshot_offset = kept.shadow_offset;
  }
}

void Snapshots::fail() {
  page().server().snapshot_failed.store(making_->serial, std::memory_order_release);
  abandon();
  if (!failed_before_)
    std::fprintf(stderr, "understudy: there is no memory for a snapshot of rank %u (limit %llu MiB)\n",
                 page().fixed().rank, static_cast<unsigned long long>(area_.area().bytes >> 20));
  failed_before_ = true;
}

void Snapshots::abandon() {
  if (!making_) return;
  copier_.stop();
  for (size_t i = 0; i < making_->rows.size(); i++)
    if (BufferTable::Buffer* b = table_.find(making_->rows[i].handle); b != nullptr && b->captured == i + 1)
      b->captured = 0;
  area_.rewind(making_->serial - 1);
  making_.reset();
  forget_unfinished();
}

bool Snapshots::holds(const CommitEntry& commit) const {
  for (const SnapshotEntry& e : page().server().snapshots)
    if (e.serial.load() != 0 && same(e.commit, commit)) return true;
  return false;
}

uint64_t Snapshots::row_of(const SnapshotEntry* slot) const {
  return replay::mark_row_of_snapshot(static_cast<uint64_t>(slot - std::begin(page().server().snapshots)));
}

CommitRow Snapshots::entry(uint64_t commit) const {
  return newest_of(commit, [commit](const CommitEntry& e) { return e.number == commit; });
}

CommitRow Snapshots::entry(const CommitEntry& commit) const {
  return newest_of(commit.number, [&commit](const CommitEntry& e) { return same(e, commit); });
}

template <class Wanted>
CommitRow Snapshots::newest_of(uint64_t number, const Wanted& wanted) const {
  const SnapshotEntry* newest = nullptr;
  for (const SnapshotEntry& e : page().server().snapshots)
    if (e.serial.load() != 0 && wanted(e.commit))
      if (newest == nullptr || e.serial.load() > newest->serial.load()) newest = &e;
  if (newest == nullptr) throw LogError("there is no snapshot of commit " + std::to_string(number));
  CommitRow row{replay::copy_once(newest->commit), {}};
  row.more = replay::read_more_marks(log_, row_of(newest), row.communicators);
  return row;
}

Manifest Snapshots::manifest(const CommitEntry& entry) const { return Manifest::read(area_.area(), entry); }

uint64_t Snapshots::newest() const {
  uint64_t newest = 0;
  for (const SnapshotEntry& e : page().server().snapshots) newest = std::max(newest, e.serial.load());
  return newest;
}

uint64_t Snapshots::floor() const {
  const uint64_t needed = page().daemon().snapshot_floor.load(std::memory_order_acquire);
  return page().fixed().world > 1 ? needed : std::max(needed, newest());
}

void Snapshots::forget_contents() {
  area_.clear();
  page().shared().snapshot_huge_bytes.store(0, std::memory_order_relaxed);
  for (auto& [handle, b] : table_.buffers()) b.snapshot_version = ~0ull;
}

// Not all of these went with an older snapshot than the newest: that one may be on storage alone, or be newer
// than the one that the rank was brought to.
void Snapshots::forget_lost_copies() {
  for (auto& [handle, b] : table_.buffers())
    if (!area_.holds(b.snapshot_offset)) b.snapshot_version = ~0ull;
}

void Snapshots::apply_floor() {
  const auto page = log_.server_page();
  if (area_.area().bytes == 0) return;
  const bool suspended = page.daemon().snapshot_suspended.load(std::memory_order_acquire) != 0;
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
    if (newest() == 0 && !making_)
      forget_contents();
    else
      forget_lost_copies();
    released_ = needed;
    leased_ = leased;
  }
  page.server().snapshot_used_bytes.store(area_.used(), std::memory_order_relaxed);
}

Snapshots::Leases Snapshots::leases() const {
  Leases leased;
  for (size_t i = 0; i < leased.size(); i++)
    leased[i] = page().daemon().snapshot_leases[i].load(std::memory_order_acquire);
  return leased;
}

void Snapshots::unpublish(uint64_t floor, const Leases& leased, bool newer) {
  for (SnapshotEntry& e : page().server().snapshots) {
    const uint64_t serial = e.serial.load(std::memory_order_relaxed);
    const bool wanted = serial == floor || (serial > floor && !newer) ||
                        std::find(leased.begin(), leased.end(), serial) != leased.end();
    if (!wanted) e.serial.store(0, std::memory_order_release);
  }
  // Whoever has read bytes of another snapshot at its place also sees that it is gone (snapshot_holds).
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

uint64_t Snapshots::keeps_log_from() const {
  const auto page = log_.server_page();
  if (!enabled()) return ~0ull;
  const uint64_t needed = floor();
  if (needed == 0 && beginning_ && page.server().freed_segments.load(std::memory_order_relaxed) == 0)
    return 0;
  uint64_t from = making_ ? making_->commit.log_offset : ~0ull;
  for (const SnapshotEntry& e : page.server().snapshots)
    if (const uint64_t serial = e.serial.load(); serial != 0 && serial >= needed)
      from = std::min(from, e.commit.log_offset);
  for (const auto* wanted : {&page.daemon().log_kept_from, &page.daemon().log_uncopied_from}) {
    const uint64_t stored = wanted->load(std::memory_order_acquire);
    const bool reaches =
        stored / log_.segment_bytes() >= page.server().freed_segments.load(std::memory_order_relaxed);
    if (stored != 0 && stored >= unkept_ && reaches) from = std::min(from, stored);
  }
  return from;
}

void Snapshots::cut(uint64_t offset) {
  beginning_ = false;
  if (making_ && making_->commit.log_offset < offset) abandon();
  for (SnapshotEntry& e : page().server().snapshots)
    if (e.commit.log_offset < offset) e.serial.store(0, std::memory_order_release);
}

}  // namespace understudy::server
