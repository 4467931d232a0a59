#include "replay/csrc/tools/snapshot_restore.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "replay/csrc/digest/digest.h"

namespace understudy::replay {
namespace {

constexpr uint64_t kBlock = 64;  // as the device server's blocks (its shadow_area.cpp)

class Layout {
 public:
  explicit Layout(const Area& area) : area_(area) {}
  uint64_t place(uint64_t bytes, uint64_t from = 0) {
    const uint64_t offset = std::max(end_, from);
    if (offset > area_.bytes || bytes > area_.bytes - offset || area_.bytes - offset - bytes < kBlock)
      throw LogError("the stored snapshot is larger than the " + std::string(area_.name) +
                     " (see --snapshot-limit)");
    end_ = offset + std::max((bytes + kBlock - 1) / kBlock, uint64_t{1}) * kBlock;
    return offset;
  }
  uint64_t end() const { return end_; }

 private:
  Area area_;
  uint64_t end_ = 0;
};

// Finds places.  What lay side by side in the area that it was read from does so again, at the same offsets
// within pages: so it lies on storage, and can be read from there as it is.
void lay_out(Manifest& manifest, Layout& layout) {
  struct Content {
    uint64_t* offset;
    uint64_t bytes;
  };
  std::vector<Content> contents;
  contents.reserve(manifest.generators.size() + manifest.buffers.size());
  for (ManifestGenerator& g : manifest.generators) contents.push_back({&g.shadow_offset, g.bytes});
  for (ManifestBuffer& b : manifest.buffers)
    if (b.shadow_offset != kNotShadowed) contents.push_back({&b.shadow_offset, b.bytes});
  std::stable_sort(contents.begin(), contents.end(),
                   [](const Content& a, const Content& b) { return *a.offset < *b.offset; });
  constexpr uint64_t kPage = 4096;
  uint64_t was_end = 0, end = 0;
  bool first = true;
  for (const Content& content : contents) {
    const uint64_t was = *content.offset;  // anybody may have written it: only differences below a page count
    const bool follows = !first && was >= was_end && was - was_end < kPage && was % kBlock == 0;
    const uint64_t from =
        follows ? end + (was - was_end) : (end + kPage - 1) / kPage * kPage + was % kPage / kBlock * kBlock;
    *content.offset = layout.place(content.bytes, (from + kBlock - 1) / kBlock * kBlock);
    end = *content.offset + content.bytes;
    was_end = was > ~0ull - content.bytes ? ~0ull : was + content.bytes;
    first = false;
  }
}

void withdraw_all(LogMap& log) {
  for (SnapshotEntry& e : log.maker_page().server().snapshots) e.serial.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  give_memory_back(log.snapshots().data, log.snapshots().bytes);
}

}  // namespace

SnapshotContents make_room_for_snapshot(LogMap& log, CommitRow commit, const std::vector<uint8_t>& manifest) {
  const MakerPage page = log.maker_page();
  commit.manifest_offset = 0;
  commit.manifest_bytes = manifest.size();
  // Where things lay in the area that it was read from is of no interest: any offset will do.
  const Area stored{const_cast<uint8_t*>(manifest.data()), ~0ull, "stored snapshot"};
  SnapshotContents found{commit, Manifest::read(stored, commit)};
  if (commit.number == 0) throw LogError("the stored row of its commit makes no sense");
  if (commit.log_offset / log.segment_bytes() <
          page.server().freed_segments.load(std::memory_order_acquire) ||
      commit.log_offset > page.worker().tail.load(std::memory_order_acquire))
    throw LogError("the log does not reach back to commit " + std::to_string(commit.number));
  Layout layout(log.snapshots());
  lay_out(found.manifest, layout);
  found.commit.manifest_offset = layout.place(manifest.size());
  withdraw_all(log);
  const uint64_t used = (layout.end() + kHugePage / 2) / kHugePage * kHugePage;
  page.shared().snapshot_huge_bytes.store(
      get_huge_pages(log.snapshots().data, std::min(used, log.snapshots().bytes)), std::memory_order_relaxed);
  page.server().snapshot_used_bytes.store(layout.end(), std::memory_order_relaxed);
  if (!reserve_memory(log.snapshots().data, layout.end()))
    throw LogError("there is no memory for the stored snapshot in /dev/shm");
  return found;
}

void publish_restored_snapshot(LogMap& log, uint64_t serial, const CommitRow& commit,
                               const std::vector<uint8_t>& manifest, const std::vector<uint64_t>& checked) {
  const Area area = log.snapshots();
  if (serial == 0 || manifest.size() != commit.manifest_bytes || commit.manifest_offset > area.bytes ||
      manifest.size() > area.bytes - commit.manifest_offset)
    throw LogError("there is no room for the manifest of snapshot " + std::to_string(serial));
  std::memcpy(area.data + commit.manifest_offset, manifest.data(), manifest.size());
  const Manifest found = Manifest::read(area, commit);
  const std::unordered_set<uint64_t> known(checked.begin(), checked.end());
  uint64_t bytes = 0;
  for (const ManifestBuffer& b : found.buffers) {
    if (b.shadow_offset == kNotShadowed) continue;
    if (b.has_digest == 1 && !known.contains(b.handle) &&
        content_digest(area.data + b.shadow_offset, b.bytes) != b.digest)
      throw LogError("buffer " + std::to_string(b.handle) + " is not what it was at the commit");
    bytes += b.bytes;
  }
  if (!write_more_marks(log, mark_row_of_snapshot(0), commit.more))
    throw LogError("there is no memory in /dev/shm for what is told of communicators");
  SnapshotEntry& entry = log.maker_page().server().snapshots[0];
  entry.bytes = bytes;
  entry.nanoseconds = 0;
  entry.commit = commit;
  entry.serial.store(serial, std::memory_order_release);
}

}  // namespace understudy::replay
