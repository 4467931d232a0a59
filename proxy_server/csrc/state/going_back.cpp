// Going back: in place by pre-images, or a fresh server from shadows, a snapshot or replicas.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "proxy_server/csrc/state/device_state.h"
#include "replay/csrc/rewind/manifest.h"

namespace understudy::server {

using replay::CommitEntry;
using replay::LogError;
using replay::Manifest;

// And where what it names lies. A commit that the rank was brought to by its snapshot has none of its own.
Manifest DeviceState::manifest_of(uint64_t number, const uint8_t*& base) const {
  const CommitEntry& e = entry(number);
  const bool own = e.manifest_bytes != 0 || !snapshots_.holds(e);
  base = own ? shadows_.at(0) : snapshots_.at(0);
  return own ? Manifest::read(shadows_.area(), e) : snapshots_.manifest(snapshots_.entry(e));
}

void DeviceState::load_generators(const Manifest& manifest, const uint8_t* base) {
  std::map<uint64_t, at::Generator> kept;
  for (const auto& g : manifest.generators) {
    at::Generator generator = this->generator(g.generator);
    driver_.set_state(generator, base + g.shadow_offset, g.bytes);
    kept.emplace(g.generator, std::move(generator));
  }
  generators_ = std::move(kept);
}

// Every commit stands at the beginning of a FORWARD_BACKWARD phase.
void DeviceState::begin_forward(replay::ServerPage page) {
  phase(replay::Phase::kForwardBackward);
  page.server().phase.store(static_cast<uint32_t>(replay::Phase::kForwardBackward));
  page.server().sealed.store(0);
}

std::pair<Position, uint64_t> DeviceState::rewind(uint64_t target) {
  driver_.streams().forget_marks();
  snapshots_.abandon();
  communicators_.forget_in_flight(table_);
  driver_.synchronize();
  const uint64_t bytes = table_.rewind(target);
  store_.give_up_arena();  // new connections need memory too; and pre-images are copied when it returns
  const auto page = log_.server_page();
  begin_forward(page);
  page.server().commit_count.store(target, std::memory_order_release);
  page.server().error_kind.store(0);
  applied_floor_ = std::min(applied_floor_, target);
  if (target == 0) {
    floor_offset_ = 0;
    start_of_session();
    communicators_.restore({});
    return {Position{}, bytes};
  }
  const CommitEntry e = entry(target);
  floor_offset_ = std::min(floor_offset_, e.log_offset);
  const uint8_t* base = nullptr;
  const Manifest manifest = manifest_of(target, base);
  shadows_.rewind(target);
  for (auto& [handle, b] : table_.buffers()) b.shadow_version = b.digest_version = ~0ull;
  for (const auto& row : manifest.buffers)
    if (BufferTable::Buffer* b = table_.find(row.handle)) b->committed_digest = row.digest;
  if (driver_.digests_in_place()) check_content(manifest);
  load_generators(manifest, base);
  settings_.load(manifest.settings);
  communicators_.restore(manifest.communicators);
  // NCCL takes what it needs for new connections beside the allocator, which holds what was freed.
  if (driver_.device().is_cuda()) driver_.give_back_freed_memory();
  return {position_of(e), bytes};
}

// Memory that changed by itself since the commit: its pre-image, taken at the first write afterwards, is
// wrong too, and only the commit's own digest knows.
void DeviceState::check_content(const Manifest& manifest) {
  std::vector<std::pair<const replay::ManifestBuffer*, BufferTable::Buffer*>> wanted;
  for (const auto& row : manifest.buffers) {
    BufferTable::Buffer* b = table_.find(row.handle);
    if (row.has_digest == 1 && b != nullptr && b->available) wanted.emplace_back(&row, b);
  }
  std::vector<BufferTable::Buffer*> buffers;
  for (const auto& [row, b] : wanted) buffers.push_back(b);
  know_digests(buffers, driver_.take(contents_of(buffers)));
  for (const auto& [told, b] : wanted) {
    const replay::ManifestBuffer& row = *told;
    if (b->digest != row.digest)
      throw LogError("buffer " + std::to_string(row.handle) + " (" + std::to_string(row.bytes) +
                     " bytes) is not what it was at commit " + std::to_string(manifest.commit) +
                     ": its memory was corrupted");
  }
}

std::pair<Position, uint64_t> DeviceState::restore(uint64_t target) {
  driver_.streams().forget_marks();
  const auto page = log_.server_page();
  snapshots_.abandon();
  communicators_.forget_in_flight(table_);
  driver_.synchronize();
  begin_forward(page);
  page.server().error_kind.store(0);
  page.server().commit_count.store(target, std::memory_order_release);
  applied_floor_ = target;
  floor_offset_ = 0;
  start_of_session();
  table_.start_at(target);
  store_.give_up_arena();
  shadows_.adopt({});
  if (target == 0) {
    communicators_.restore({});
    return {Position{}, 0};
  }
  const CommitEntry e = entry(target);
  floor_offset_ = e.log_offset;
  const Manifest manifest = Manifest::read(shadows_.area(), e);
  shadows_.adopt({{&manifest, &e, target}});
  uint64_t bytes = 0;
  for (const auto& row : manifest.buffers) {
    adopt_buffer(row, shadows_.at(0));
    if (row.shadow_offset == replay::kNotShadowed) continue;
    BufferTable::Buffer& b = *table_.find(row.handle);
    b.shadow_offset = row.shadow_offset;
    b.shadow_version = b.version;
    bytes += row.bytes;
  }
  load_generators(manifest, shadows_.at(0));
  settings_.load(manifest.settings);
  communicators_.restore(manifest.communicators);
  return {position_of(e), bytes};
}

std::pair<Position, uint64_t> DeviceState::restore_snapshot(uint64_t target) {
  replay::CommitRow e = snapshots_.entry(target);
  const Manifest manifest = snapshots_.manifest(e);
  restore(0);
  applied_floor_ = target;
  floor_offset_ = e.log_offset;
  table_.start_at(target);
  uint64_t bytes = 0;
  for (const auto& row : manifest.buffers) {
    adopt_buffer(row, snapshots_.at(0));
    BufferTable::Buffer& b = *table_.find(row.handle);
    if (row.shadow_offset == replay::kNotShadowed) continue;
    b.snapshot_offset = row.shadow_offset;
    b.snapshot_version = b.version;
    bytes += row.bytes;
  }
  load_generators(manifest, snapshots_.at(0));
  settings_.load(manifest.settings);
  communicators_.restore(manifest.communicators);
  // It is the rank's newest commit now, though without a manifest in `shadow`: that one is of the snapshot.
  e.manifest_offset = e.manifest_bytes = 0;
  e.flags &= replay::kCommitFreesApplied;
  const auto page = log_.server_page();
  if (!replay::write_more_marks(log_, replay::mark_row_of_commit(target), e.more))
    throw LogError("there is no memory in /dev/shm for what a commit says of communicators");
  page.server().commits[target % replay::kCommitRing] = e;
  page.server().commit_count.store(target, std::memory_order_release);
  return {position_of(e), bytes};
}

// A buffer of a commit, with its content if that lies in host memory.
void DeviceState::adopt_buffer(const replay::ManifestBuffer& row, const uint8_t* base) {
  if (row.has_digest == 2) {
    table_.adopt(row.handle, without_content(row.bytes), false);
    return;
  }
  BufferTable::Buffer& b = table_.adopt(row.handle, driver_.allocate(row.bytes), true);
  b.committed_digest = row.digest;
  if (row.shadow_offset == replay::kNotShadowed) return;
  driver_.from_host(b.content, 0, row.bytes, base + row.shadow_offset);
  if (row.has_digest == 1 && driver_.digest(b.content) != row.digest)
    throw LogError("the shadow of buffer " + std::to_string(row.handle) + " is damaged");
}

c10::Storage DeviceState::without_content(uint64_t bytes) const {
  return store_.hollow(c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                                    c10::DataPtr(nullptr, driver_.device()), nullptr, false));
}

void DeviceState::create_without_content(uint64_t handle, uint64_t bytes) {
  table_.create(handle, without_content(bytes)).available = false;
}

void DeviceState::adopt_replica(uint64_t handle, uint64_t offset, const void* data, uint64_t bytes) {
  BufferTable::Buffer* b = table_.find(handle);
  if (b == nullptr || offset > b->content.nbytes() || bytes > b->content.nbytes() - offset)
    throw LogError("a replica sent bytes that do not fit buffer " + std::to_string(handle));
  driver_.from_host(b->content, offset, bytes, data);
  b->available = true;        // another replica may not have had it
  b->shadow_version = ~0ull;  // if it has one, that holds something else
}

bool DeviceState::read_from_process(int pid, const std::vector<std::pair<uint64_t, uint64_t>>& places) {
  constexpr uint64_t kMostAtOnce = 1 << 30;  // bytes; the kernel reads less than 2 GiB in one call
  if (!driver_.device().is_cpu()) return false;
  std::vector<iovec> here, there;
  uint64_t bytes = 0, done = 0;
  const auto read = [&] {
    if (here.empty()) return true;
    const ssize_t n = process_vm_readv(pid, here.data(), here.size(), there.data(), there.size(), 0);
    if (n < 0 && (errno == EPERM || errno == ENOSYS) && done == 0) return false;
    if (n != static_cast<ssize_t>(bytes))
      throw LogError("the memory of a replica could not be read: " +
                     std::string(n < 0 ? std::strerror(errno) : "some of it has gone"));
    done += bytes;
    bytes = 0;
    here.clear();
    there.clear();
    return true;
  };
  for (const auto& [handle, address] : places) {
    BufferTable::Buffer* b = table_.find(handle);
    if (b == nullptr) throw LogError("a replica has no buffer for " + std::to_string(handle));
    auto* const to = static_cast<uint8_t*>(b->content.storage().mutable_data());
    for (uint64_t at = 0; at < b->content.nbytes();) {
      const uint64_t n = std::min<uint64_t>(b->content.nbytes() - at, kMostAtOnce - bytes);
      here.push_back({to + at, n});
      there.push_back({reinterpret_cast<void*>(address + at), n});
      at += n;
      bytes += n;
      if ((bytes == kMostAtOnce || here.size() == IOV_MAX) && !read()) return false;
    }
  }
  if (!read()) return false;
  for (const auto& [handle, address] : places) {
    BufferTable::Buffer& b = *table_.find(handle);
    b.available = true;
    b.shadow_version = ~0ull;
  }
  return true;
}

void DeviceState::mark_lost(uint64_t handle) {
  BufferTable::Buffer* b = table_.find(handle);
  if (b == nullptr) throw LogError("a replica spoke of an unknown buffer");
  b->available = false;
}

void DeviceState::complete_restore(const std::vector<std::pair<uint64_t, uint64_t>>& digests) {
  std::vector<BufferTable::Buffer*> copied;
  for (const auto& [handle, expected] : digests) {
    BufferTable::Buffer* b = table_.find(handle);
    if (b == nullptr) throw LogError("a replicated buffer is not part of the commit");
    if (b->available) copied.push_back(b);
  }
  know_digests(copied, driver_.take(contents_of(copied)));
  for (const auto& [handle, expected] : digests) {
    BufferTable::Buffer* b = table_.find(handle);
    if (!b->available) continue;
    b->replicated = true;
    if (b->digest != expected)
      throw LogError("buffer " + std::to_string(handle) +
                     " copied from a replica differs from this rank's own at the commit");
  }
}

}  // namespace understudy::server
