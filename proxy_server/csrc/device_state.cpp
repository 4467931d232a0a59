#include "proxy_server/csrc/device_state.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstring>

#include "replay/csrc/futex.h"
#include "replay/csrc/manifest.h"

namespace understudy::server {

using replay::CommitEntry;
using replay::LogError;
using replay::Manifest;
using replay::Setting;

DeviceState::DeviceState(const Driver& driver, replay::LogMap& log, Policy policy,
                         Communicators& communicators)
    : driver_(driver),
      log_(log),
      policy_(policy),
      communicators_(communicators),
      store_(driver),
      table_(store_),
      shadows_(log),
      uploads_(driver.device()) {
  table_.protect(policy.protect);
  start_of_session();
}

void DeviceState::start_of_session() {
  generators_.clear();
  at::Generator first = driver_.default_generator();
  first.set_current_seed(c10::default_rng_seed_val);
  generators_.emplace(0, std::move(first));
  settings_.clear();
  at::globalContext().setDeterministicAlgorithms(false, false);
  at::globalContext().setFloat32MatmulPrecision("highest");
}

at::Generator& DeviceState::generator(uint64_t id) {
  auto it = generators_.find(id);
  if (it == generators_.end()) it = generators_.emplace(id, driver_.new_generator()).first;
  return it->second;
}

void DeviceState::set(Setting setting, uint64_t value) {
  settings_[static_cast<uint64_t>(setting)] = value;
  auto& context = at::globalContext();
  switch (setting) {
    case Setting::kThreads:
      if (value >= 1 && value <= 1024) at::set_num_threads(static_cast<int>(value));
      return;
    case Setting::kDeterministic:
      context.setDeterministicAlgorithms(value != 0, value == 2);
      return;
    case Setting::kMatmulPrecision:
      context.setFloat32MatmulPrecision(value == 0 ? "highest" : value == 1 ? "high" : "medium");
      return;
    case Setting::kFlushDenormal:
      context.setFlushDenormal(value != 0);
      return;
  }
  throw LogError("unknown setting " + std::to_string(static_cast<uint64_t>(setting)));
}

void DeviceState::phase(replay::Phase phase) {
  table_.preimages(phase != replay::Phase::kOptimizer || policy_.optimizer_preimages);
}

const CommitEntry& DeviceState::entry(uint64_t number) const {
  const CommitEntry& e = log_.page().commits[number % replay::kCommitRing];
  if (number == 0 || e.number != number)
    throw LogError("commit " + std::to_string(number) + " is no longer known");
  return e;
}

Position DeviceState::position_of(const CommitEntry& e) const {
  return {e.log_offset, e.record_index, (e.flags & replay::kCommitFreesApplied) != 0, e.step, e.call};
}

uint64_t DeviceState::commit(const Position& position) {
  communicators_.wait_for_all(table_);
  const uint64_t number = table_.epoch() + 1;
  CommitEntry e{};
  e.number = number;
  e.log_offset = position.offset;
  e.record_index = position.index;
  e.step = position.steps;
  e.call = position.call;
  e.flags = position.frees_done ? replay::kCommitFreesApplied : 0;
  communicators_.marks(e);
  if (policy_.protect) {
    Manifest m;
    m.commit = number;
    bool complete = e.communicators <= replay::kMaxCommunicators;
    m.buffers.reserve(table_.size());
    for (auto& [handle, b] : table_.buffers()) {
      replay::ManifestBuffer row{handle, b.content.nbytes(), 0, replay::kNotShadowed, 0};
      if (!b.available) {
        row.has_digest = 2;
      } else {
        if (b.born < table_.epoch()) {  // what lives for one minibatch only is not worth a digest
          if (b.digest_version != b.version) {
            b.digest = driver_.digest(b.content);
            b.digest_version = b.version;
          }
          row.digest = b.digest;
          row.has_digest = 1;
        }
        if (!b.replicated) {
          if (b.shadow_version == b.version) {
            shadows_.keep(b.shadow_offset, number);
            row.shadow_offset = b.shadow_offset;
          } else if (const auto place = shadows_.allocate(row.bytes, number)) {
            driver_.to_host(b.content, 0, row.bytes, shadows_.at(*place));
            b.shadow_offset = row.shadow_offset = *place;
            b.shadow_version = b.version;
          } else {
            complete = false;
          }
        }
      }
      m.buffers.push_back(row);
    }
    for (auto& [id, g] : generators_) {
      const at::Tensor state = g.get_state();
      const auto place = shadows_.allocate(state.nbytes(), number);
      if (!place) {
        complete = false;
        continue;
      }
      std::memcpy(shadows_.at(*place), state.const_data_ptr(), state.nbytes());
      m.generators.push_back({id, state.nbytes(), *place});
    }
    m.communicators = communicators_.manifest();
    for (const auto& [setting, value] : settings_) m.settings.push_back({setting, value});
    if (const auto place = shadows_.allocate(m.encoded_bytes(), number)) {
      m.encode(shadows_.at(*place));
      e.manifest_offset = *place;
      e.manifest_bytes = m.encoded_bytes();
    } else {
      complete = false;
    }
    if (complete) e.flags |= replay::kCommitComplete;
    if (!complete && !shadow_full_warned_) {
      std::fprintf(stderr,
                   "understudy: the shadow area of rank %u is full; commits without it cannot be restored\n",
                   log_.page().rank);
      shadow_full_warned_ = true;
    }
  }
  table_.commit();
  table_.preimages(true);
  uploads_.mark(number);
  auto& page = log_.page();
  page.commits[number % replay::kCommitRing] = e;
  page.commit_count.store(number, std::memory_order_release);
  if (e.flags & replay::kCommitComplete) page.degraded.store(0);
  apply_floor();
  publish_statistics();
  return number;
}

uint64_t DeviceState::floor() const {
  const uint64_t newest = table_.epoch();
  if (!policy_.protect) return newest;
  uint64_t floor = std::min(log_.page().floor_commit.load(std::memory_order_acquire), newest);
  if (newest - floor > replay::kCommitRing - 4) floor = newest - (replay::kCommitRing - 4);
  return floor;
}

bool DeviceState::apply_floor() {
  const uint64_t target = floor();
  if (target <= applied_floor_) return false;
  applied_floor_ = target;
  table_.release(target);
  shadows_.release(target);
  auto& page = log_.page();
  const uint64_t freed = entry(target).log_offset / log_.segment_bytes();
  if (freed <= page.freed_segments.load(std::memory_order_relaxed)) return false;
  uploads_.wait(target);
  page.freed_segments.store(freed, std::memory_order_release);
  page.freed_futex.fetch_add(1);
  replay::futex_wake(page.freed_futex);
  return true;
}

void DeviceState::cut_log() {
  log_.page().floor_commit.store(table_.epoch(), std::memory_order_release);
  if (policy_.protect) log_.page().degraded.store(1);
  apply_floor();
}

void DeviceState::load_generators(const Manifest& manifest) {
  std::map<uint64_t, at::Generator> kept;
  for (const auto& g : manifest.generators) {
    at::Generator generator = this->generator(g.generator);
    at::Tensor state = at::empty({static_cast<int64_t>(g.bytes)}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), shadows_.at(g.shadow_offset), g.bytes);
    generator.set_state(state);
    kept.emplace(g.generator, std::move(generator));
  }
  generators_ = std::move(kept);
}

void DeviceState::load_settings(const Manifest& manifest) {
  for (const auto& s : manifest.settings) set(static_cast<Setting>(s.setting), s.value);
}

// Every commit stands at the beginning of a FORWARD_BACKWARD phase.
void DeviceState::begin_forward(replay::ControlPage& page) {
  phase(replay::Phase::kForwardBackward);
  page.phase.store(static_cast<uint32_t>(replay::Phase::kForwardBackward));
}

std::pair<Position, uint64_t> DeviceState::rewind(uint64_t target) {
  communicators_.forget_in_flight(table_);
  uploads_.clear();
  driver_.synchronize();
  const uint64_t bytes = table_.rewind(target);
  auto& page = log_.page();
  begin_forward(page);
  page.commit_count.store(target, std::memory_order_release);
  page.error_kind.store(0);
  applied_floor_ = std::min(applied_floor_, target);
  if (target == 0) {
    start_of_session();
    communicators_.restore({});
    return {Position{}, bytes};
  }
  const Manifest manifest = Manifest::read(log_, entry(target));
  shadows_.rewind(target);
  for (auto& [handle, b] : table_.buffers()) b.shadow_version = b.digest_version = ~0ull;
  load_generators(manifest);
  load_settings(manifest);
  communicators_.restore(manifest.communicators);
  return {position_of(entry(target)), bytes};
}

std::pair<Position, uint64_t> DeviceState::restore(uint64_t target) {
  auto& page = log_.page();
  begin_forward(page);
  page.error_kind.store(0);
  page.commit_count.store(target, std::memory_order_release);
  applied_floor_ = target;
  if (target == 0) {
    table_.start_at(0);
    start_of_session();
    communicators_.restore({});
    return {Position{}, 0};
  }
  const CommitEntry& e = entry(target);
  const Manifest manifest = Manifest::read(log_, e);
  table_.start_at(target);
  shadows_.adopt(manifest, e);
  uint64_t bytes = 0;
  for (const auto& row : manifest.buffers) {
    if (row.has_digest == 2) {
      table_.adopt(row.handle,
                   store_.hollow(c10::Storage(c10::Storage::use_byte_size_t(), row.bytes,
                                              c10::DataPtr(nullptr, driver_.device()), nullptr, false)),
                   false);
      continue;
    }
    BufferTable::Buffer& b = table_.adopt(row.handle, driver_.allocate(row.bytes), true);
    if (row.shadow_offset == replay::kNotShadowed) continue;
    driver_.from_host(b.content, 0, row.bytes, shadows_.at(row.shadow_offset));
    if (row.has_digest == 1 && driver_.digest(b.content) != row.digest)
      throw LogError("the shadow of buffer " + std::to_string(row.handle) + " is damaged");
    b.shadow_offset = row.shadow_offset;
    b.shadow_version = b.version;
    bytes += row.bytes;
  }
  load_generators(manifest);
  load_settings(manifest);
  communicators_.restore(manifest.communicators);
  return {position_of(e), bytes};
}

void DeviceState::adopt_replica(uint64_t handle, uint64_t offset, const void* data, uint64_t bytes) {
  BufferTable::Buffer* b = table_.find(handle);
  if (b == nullptr || offset > b->content.nbytes() || bytes > b->content.nbytes() - offset)
    throw LogError("a replica sent bytes that do not fit buffer " + std::to_string(handle));
  driver_.from_host(b->content, offset, bytes, data);
}

void DeviceState::mark_lost(uint64_t handle) {
  BufferTable::Buffer* b = table_.find(handle);
  if (b == nullptr) throw LogError("a replica spoke of an unknown buffer");
  b->available = false;
}

void DeviceState::complete_restore(const std::vector<std::pair<uint64_t, uint64_t>>& digests) {
  for (const auto& [handle, expected] : digests) {
    BufferTable::Buffer* b = table_.find(handle);
    if (b == nullptr) throw LogError("a replicated buffer is not part of the commit");
    if (!b->available) continue;
    b->digest = driver_.digest(b->content);
    b->digest_version = b->version;
    b->replicated = true;
    if (b->digest != expected)
      throw LogError("buffer " + std::to_string(handle) +
                     " copied from a replica differs from this rank's own at the commit");
  }
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

void DeviceState::set_replicated(const std::vector<uint64_t>& handles) {
  for (auto& [handle, b] : table_.buffers()) b.replicated = false;
  for (const uint64_t handle : handles)
    if (BufferTable::Buffer* b = table_.find(handle)) b->replicated = true;
}

void DeviceState::publish_statistics() {
  auto& page = log_.page();
  page.live_buffers.store(table_.size(), std::memory_order_relaxed);
  page.live_bytes.store(table_.live_bytes(), std::memory_order_relaxed);
  page.undo_bytes.store(table_.undo_bytes(), std::memory_order_relaxed);
  page.shadow_used_bytes.store(shadows_.used(), std::memory_order_relaxed);
}

}  // namespace understudy::server
