#include "proxy_server/csrc/state/device_state.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "replay/csrc/digest/digest.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/rewind/manifest.h"

namespace understudy::server {

using replay::CommitEntry;
using replay::LogError;
using replay::Manifest;

// What was born in a minibatch and is alive where its optimizer step begins: a loss is shadowed there, what
// is larger than this (a gradient, which replicas hold too) is not.
constexpr uint64_t kMostForShadow = 1 << 20;  // bytes
constexpr uint64_t kLeastVictim = 16;  // bytes, of what a drill spoils: a parameter rather than a counter

DeviceState::DeviceState(const Driver& driver, replay::LogMap& log, Policy policy,
                         Communicators& communicators, int threads)
    : driver_(driver),
      log_(log),
      policy_(policy),
      communicators_(communicators),
      store_(driver),
      table_(store_),
      shadows_(log.shadows()),
      snapshots_(driver, log, table_),
      settings_(threads) {
  table_.protect(policy.protect);
  driver.streams().when_opened([this](c10::Stream stream) { share_contents(stream); });
  // One that had no room for them has told the server that comes after it.
  keep_step_preimages(policy.optimizer_preimages &&
                      log.server_page().server().final_steps.load(std::memory_order_relaxed) == 0);
  start_of_session();
}

void DeviceState::start_of_session() {
  generators_.clear();
  at::Generator first = driver_.default_generator();
  first.set_current_seed(c10::default_rng_seed_val);
  generators_.emplace(0, std::move(first));
  settings_.reset();
}

at::Generator& DeviceState::generator(uint64_t id) {
  auto it = generators_.find(id);
  if (it == generators_.end()) it = generators_.emplace(id, driver_.new_generator()).first;
  return it->second;
}

std::vector<uint8_t> DeviceState::generator_state(uint64_t id) {
  at::Generator& generator = this->generator(id);
  std::vector<uint8_t> state(kBytesOfGeneratorState);
  if (driver_.device().is_cpu()) {
    const auto [seed, offset] = positions_.state(*at::check_generator<at::CPUGeneratorImpl>(generator));
    std::memcpy(state.data(), &seed, sizeof seed);
    std::memcpy(state.data() + sizeof seed, &offset, sizeof offset);
  } else {
    const at::Tensor given = generator.get_state();
    state.assign(given.const_data_ptr<uint8_t>(), given.const_data_ptr<uint8_t>() + given.numel());
  }
  return state;
}

void DeviceState::set_generator_state(uint64_t id, const uint8_t* state, uint64_t bytes) {
  at::Generator& generator = this->generator(id);
  if (!driver_.device().is_cpu()) return driver_.set_state(generator, state, bytes);
  TORCH_CHECK(bytes == kBytesOfGeneratorState, "RNG state is wrong size");
  uint64_t seed, offset;
  std::memcpy(&seed, state, sizeof seed);
  std::memcpy(&offset, state + sizeof seed, sizeof offset);
  positions_.set(*at::check_generator<at::CPUGeneratorImpl>(generator), seed, offset);
}

void DeviceState::phase(replay::Phase phase) {
  table_.preimages(phase != replay::Phase::kOptimizer || step_preimages_);
  watches_step_ = phase == replay::Phase::kOptimizer && step_preimages_ && !table_.sealed();
}

void DeviceState::keep_step_preimages(bool keep) {
  step_preimages_ = keep;
  page().server().final_steps.store(steps_are_final() ? 1 : 0, std::memory_order_relaxed);
}

bool DeviceState::make_room() {
  if (store_.give_up_idle_arena()) {
    driver_.give_back_freed_memory();
    return true;
  }
  if (table_.undo_bytes() == 0) return false;
  if (!std::exchange(room_made_, true))
    std::fprintf(
        stderr,
        "understudy: rank %u lets go of %llu bytes that it keeps of the last commit, as the program "
        "needs memory. A fault before the next commit cannot be undone in place, and needs a replica "
        "or a snapshot. It is said only once\n",
        page().fixed().rank, static_cast<unsigned long long>(table_.undo_bytes()));
  table_.make_room();
  store_.clear();
  store_.give_up_arena();
  driver_.give_back_freed_memory();
  return true;
}

CommitEntry DeviceState::entry(uint64_t number) const {
  const CommitEntry e = replay::copy_once(page().server().commits[number % replay::kCommitRing]);
  if (number == 0 || e.number != number)
    throw LogError("commit " + std::to_string(number) + " is no longer known");
  return e;
}

replay::CommitRow DeviceState::newest_commit() const {
  replay::CommitRow row{entry(table_.epoch()), {}};
  row.more = replay::read_more_marks(log_, replay::mark_row_of_commit(table_.epoch()), row.communicators);
  return row;
}

Position DeviceState::position_of(const CommitEntry& e) const {
  return {e.log_offset, e.record_index, (e.flags & replay::kCommitFreesApplied) != 0, e.step, e.call};
}

bool DeviceState::committed_for_optimizer(uint64_t record_index) const {
  if (table_.epoch() == 0) return false;
  const CommitEntry e = entry(table_.epoch());
  return e.record_index == record_index && (e.flags & replay::kCommitOptimizer) != 0;
}

// Nothing is published, delivered or let go before the device has passed it and no abort was asked for: what
// is queued behind an aborted collective runs, on whatever that left in its buffers.
void DeviceState::pass_the_device(bool waited) {
  if (driver_.device().is_cpu()) return;
  if (!waited) driver_.synchronize();
  if (communicators_.cut_short()) throw CollectiveError("communication was aborted");
}

uint64_t DeviceState::commit(const Position& position, bool optimizer, bool for_snapshot,
                             uint64_t step_digest) {
  const OnDefaultStream together(driver_.streams());
  communicators_.wait_for_all(table_);
  const uint64_t number = table_.epoch() + 1;
  bool complete = true;
  std::optional<Manifest> manifest;
  if (policy_.protect)
    manifest = describe(number, optimizer, complete);
  else
    pass_the_device();
  CommitEntry e{};
  e.number = number;
  e.log_offset = position.offset;
  e.record_index = position.index;
  e.step = position.steps;
  e.call = position.call;
  e.step_digest = step_digest;
  e.flags =
      (position.frees_done ? replay::kCommitFreesApplied : 0) | (optimizer ? replay::kCommitOptimizer : 0);
  replay::Marks more = replay::place_marks(e, communicators_.marks());
  const bool named = replay::write_more_marks(log_, replay::mark_row_of_commit(number), more);
  if (!named) e.communicators = replay::kMaxCommunicators + 1;
  if (policy_.protect) {
    const auto place = manifest ? shadows_.allocate(manifest->encoded_bytes(), number) : std::nullopt;
    if (place) {
      manifest->encode(shadows_.at(*place));
      e.manifest_offset = *place;
      e.manifest_bytes = manifest->encoded_bytes();
    } else {
      complete = false;
    }
    if (complete && named)
      e.flags |= replay::kCommitComplete;
    else
      tell_incomplete(named, replay::kMarksInPlace + more.size());
  }
  if (std::exchange(watches_step_, false) && table_.sealed()) keep_step_preimages(false);
  const auto page = log_.server_page();
  page.server().sealed.store(0, std::memory_order_relaxed);
  table_.commit();
  table_.preimages(true);
  page.server().commits[number % replay::kCommitRing] = e;
  page.server().commit_count.store(number, std::memory_order_release);
  // Not before: behind an optimizer's step without pre-images there is no other commit to go back to.
  page.server().phase.store(static_cast<uint32_t>(replay::Phase::kForwardBackward),
                            std::memory_order_relaxed);
  if (e.flags & replay::kCommitComplete) page.server().degraded.store(0);
  if (const uint64_t serial = for_snapshot ? snapshots_.ordered(e.step) : 0; __builtin_expect(serial != 0, 0))
    begin_snapshot(serial, {e, std::move(more)});
  apply_floor();
  store_.at_commit();
  driver_.streams().forget_marks();  // the device has passed them
  communicators_.forget_newest();
  publish_statistics();
  return number;
}

// What is known of all buffers at commit `number`, with digests, and with shadows where no replica holds the
// same. By one wait for the device, behind which nothing has been cut short.
std::optional<Manifest> DeviceState::describe(uint64_t number, bool optimizer, bool& complete) {
  Manifest m;
  m.commit = number;
  // Before the buffers: pre-images lead those back, but nothing leads a generator back.
  const bool generators = shadow_generators(number, m);
  m.buffers.reserve(table_.size());
  std::vector<BufferTable::Buffer*> digested;
  std::vector<HostCopy> copies;
  bool waited = false;
  for (auto& [handle, b] : table_.buffers()) {
    replay::ManifestBuffer row{handle, b.content.nbytes(), 0, replay::kNotShadowed, 0};
    const bool fresh = b.born == table_.epoch();
    const bool there = b.content.storage().device().is_cuda();
    if (!b.available) {
      row.has_digest = 2;
    } else if (!fresh || optimizer || number == 1) {
      // What lives for one minibatch only is not worth a digest; at the first commit nobody can tell.
      row.has_digest = 1;
      if (b.digest_version != b.version) digested.push_back(&b), waited |= there && row.bytes != 0;
    }
    if (!b.available) {
      // There is nothing to copy.
    } else if (b.replicated || (optimizer && fresh && row.bytes > kMostForShadow)) {
      b.shadow_version = ~0ull;  // from here on nobody keeps its shadow
    } else if (b.shadow_version == b.version) {
      shadows_.keep(b.shadow_offset, number);
      row.shadow_offset = b.shadow_offset;
    } else if (const auto place = shadows_.allocate(row.bytes, number)) {
      copies.push_back({&b.content.storage(), shadows_.at(*place)}), waited |= there && row.bytes != 0;
      row.shadow_offset = *place;
    } else {
      complete = false;
    }
    m.buffers.push_back(row);
  }
  const std::vector<uint64_t> digests = driver_.take(contents_of(digested), copies);
  pass_the_device(waited);
  know_digests(digested, digests);
  auto row = m.buffers.begin();
  for (auto& [handle, b] : table_.buffers()) {
    if (row->has_digest == 1) row->digest = b.digest;
    b.committed_digest = row->digest;
    if (row->shadow_offset != replay::kNotShadowed) {
      b.shadow_offset = row->shadow_offset;
      b.shadow_version = b.version;
    }
    ++row;
  }
  m.communicators = communicators_.manifest();
  m.settings = settings_.manifest();
  if (generators) return m;
  complete = false;
  return std::nullopt;
}

void DeviceState::tell_incomplete(bool named, size_t communicators) {
  if (std::exchange(incomplete_told_, true)) return;
  const uint32_t rank = page().fixed().rank;
  if (named)
    std::fprintf(stderr,
                 "understudy: the shadow area of rank %u is full; commits without it cannot be restored\n",
                 rank);
  else
    std::fprintf(
        stderr,
        "understudy: rank %u uses %zu communicators (a peer that it exchanges messages with counts "
        "as two), and a commit has room for %llu, where /dev/shm has: commits without them cannot be "
        "restored\n",
        rank, communicators, static_cast<unsigned long long>(replay::kMaxCommunicators));
}

bool DeviceState::shadow_generators(uint64_t commit, Manifest& manifest) {
  for (auto& [id, g] : generators_) {
    const at::Tensor state = g.get_state();
    const auto place = shadows_.allocate(state.nbytes(), commit);
    if (!place) return false;
    std::memcpy(shadows_.at(*place), state.const_data_ptr(), state.nbytes());
    manifest.generators.push_back({id, state.nbytes(), *place});
  }
  return true;
}

void DeviceState::begin_snapshot(uint64_t serial, replay::CommitRow e) {
  if (e.communicators > replay::kMaxCommunicators) return;  // no cut can be found with it
  Manifest rest;
  rest.commit = e.number;
  rest.communicators = communicators_.manifest();
  rest.settings = settings_.manifest();
  std::vector<std::pair<uint64_t, at::Tensor>> generators;
  for (auto& [id, g] : generators_) generators.emplace_back(id, g.get_state());
  snapshots_.begin(serial, std::move(e), std::move(rest), generators);
}

// Not where one is awaited of another commit, which has the next serial.
bool DeviceState::snapshot_here() {
  if (!snapshots_.enabled() || page().fixed().world > 1) return false;
  if (table_.epoch() == 0) return false;
  const CommitEntry newest = entry(table_.epoch());
  if (!snapshots_.of(newest) && !snapshots_.awaited())
    begin_snapshot(snapshots_.next_serial(), newest_commit());
  return snapshots_.of(newest);
}

bool DeviceState::snapshot_now() {
  if (!snapshots_.enabled() || page().fixed().world > 1) return false;
  const CommitEntry newest = entry(table_.epoch());
  if (!snapshots_.of(newest)) begin_snapshot(snapshots_.next_serial(), newest_commit());
  snapshots_.finish();
  if (!snapshots_.holds(newest)) return false;
  snapshots_.let_log_go(newest.log_offset);
  return true;
}

uint64_t DeviceState::floor() const {
  const uint64_t newest = table_.epoch();
  if (!policy_.protect) return newest;
  uint64_t floor = std::min(page().shared().floor_commit.load(std::memory_order_acquire), newest);
  if (newest - floor > replay::kCommitRing - 4) floor = newest - (replay::kCommitRing - 4);
  return floor;
}

bool DeviceState::apply_floor() {
  if (const uint64_t target = floor(); target > applied_floor_) {
    applied_floor_ = target;
    table_.release(target);
    shadows_.release(target);
    floor_offset_ = entry(target).log_offset;
  }
  snapshots_.apply_floor();
  const auto page = log_.server_page();
  const uint64_t freed = std::min(floor_offset_, snapshots_.keeps_log_from()) / log_.segment_bytes();
  if (freed <= page.server().freed_segments.load(std::memory_order_relaxed)) return false;
  page.server().freed_segments.store(freed, std::memory_order_release);
  page.shared().freed_futex.fetch_add(1);
  replay::futex_wake(page.shared().freed_futex);
  return true;
}

void DeviceState::cut_log() {
  page().shared().floor_commit.store(table_.epoch(), std::memory_order_release);
  if (policy_.protect) page().server().degraded.store(1);
  snapshots_.cut(entry(table_.epoch()).log_offset);
  snapshots_.let_log_go(entry(table_.epoch()).log_offset);
  apply_floor();
}

void DeviceState::read_state(uint64_t handle, uint64_t offset, uint64_t bytes, void* to) {
  BufferTable::Buffer* b = table_.find(handle);
  if (b == nullptr || !b->available || offset > b->content.nbytes() || bytes > b->content.nbytes() - offset)
    throw LogError("no such state: buffer " + std::to_string(handle));
  driver_.to_host(b->content, offset, bytes, to);
}

bool DeviceState::has_content(uint64_t handle) {
  BufferTable::Buffer* b = table_.find(handle);
  return b != nullptr && b->available;
}

std::optional<std::vector<DeviceState::Place>> DeviceState::locate() {
  if (!driver_.device().is_cpu()) return std::nullopt;
  std::vector<Place> places;
  places.reserve(table_.size());
  for (auto& [handle, b] : table_.buffers())
    if (b.available)
      places.push_back({handle, reinterpret_cast<uint64_t>(b.content.storage().data()), b.content.nbytes()});
  return places;
}

std::vector<const c10::Storage*> DeviceState::contents_of(const std::vector<BufferTable::Buffer*>& buffers) {
  std::vector<const c10::Storage*> contents;
  contents.reserve(buffers.size());
  for (const BufferTable::Buffer* b : buffers) contents.push_back(&b->content.storage());
  return contents;
}

void DeviceState::know_digests(const std::vector<BufferTable::Buffer*>& buffers,
                               const std::vector<uint64_t>& digests) {
  for (size_t i = 0; i < buffers.size(); i++) {
    buffers[i]->digest = digests[i];
    buffers[i]->digest_version = buffers[i]->version;
  }
}

std::vector<std::pair<uint64_t, uint64_t>> DeviceState::content_digests() {
  communicators_.wait_for_all(table_);
  pass_the_device();
  std::vector<uint64_t> handles;
  std::vector<const c10::Storage*> contents;
  for (auto& [handle, b] : table_.buffers()) {
    if (!b.available) continue;
    handles.push_back(handle);
    contents.push_back(&b.content.storage());
  }
  std::vector<std::pair<uint64_t, uint64_t>> found;
  for (const uint64_t digest : driver_.take(contents)) found.emplace_back(handles[found.size()], digest);
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::pair<uint64_t, uint64_t>> DeviceState::generator_digests() const {
  std::vector<std::pair<uint64_t, uint64_t>> found;
  for (const auto& [id, generator] : generators_) {
    const at::Tensor state = generator.get_state();
    found.emplace_back(id, replay::digest(state.const_data_ptr(), state.nbytes()));
  }
  return found;
}

void DeviceState::set_replicated(const std::vector<uint64_t>& handles) {
  for (auto& [handle, b] : table_.buffers()) b.replicated = false;
  for (const uint64_t handle : handles)
    if (BufferTable::Buffer* b = table_.find(handle)) b->replicated = true;
}

uint64_t DeviceState::flip_bit() {
  uint64_t victim = 0;
  for (auto& [handle, b] : table_.buffers()) {
    if (b.born >= table_.epoch() || !b.available || b.in_flight || b.content.nbytes() < kLeastVictim)
      continue;
    if (victim == 0 || handle < victim) victim = handle;
  }
  if (victim == 0) return 0;
  const Content& content = table_.find(victim)->content;
  const uint64_t middle = content.nbytes() / 2;
  uint8_t byte = 0;
  driver_.to_host(content, middle, 1, &byte);
  byte ^= 1;
  driver_.from_host(content, middle, 1, &byte);
  return victim;
}

void DeviceState::publish_statistics() {
  const auto page = log_.server_page();
  page.server().live_buffers.store(table_.size(), std::memory_order_relaxed);
  page.server().live_bytes.store(table_.live_bytes(), std::memory_order_relaxed);
  page.server().undo_bytes.store(table_.undo_bytes(), std::memory_order_relaxed);
  page.server().shadow_used_bytes.store(shadows_.used(), std::memory_order_relaxed);
}

}  // namespace understudy::server
