// Whoever reads commits: proxyd chooses one from the ring, a fresh device server takes over its manifest and
// the shadow area, and goes on saving there.
#include "fuzz/input.h"
#include "proxy_server/csrc/snapshots/shadow_area.h"
#include "replay/csrc/digest/digest.h"
#include "replay/csrc/rewind/manifest.h"
#include "replay/csrc/tools/log_view.h"

#include <map>

namespace understudy::fuzz {
namespace {

using replay::LogError;
using replay::LogMap;
using replay::Manifest;
using replay::ManifestHeader;

// Makes what lies at the commit's place pass the checks that only chance decides.
void mend(Log& memory, const LogMap& log) {
  const Input& in = memory.input;
  const uint64_t room = log.shadow_bytes();
  if (in.manifest_offset > room || room - in.manifest_offset < sizeof(ManifestHeader)) return;
  uint8_t* const place = memory.shadow_begin + in.manifest_offset;
  ManifestHeader header;
  std::memcpy(&header, place, sizeof header);
  if (in.mend & kMagicAndBytes) {
    header.magic = replay::kManifestMagic;
    header.commit = in.commit;
    header.bytes = in.manifest_bytes;
  }
  if (in.mend & kDigest && header.bytes >= sizeof header && header.bytes <= room - in.manifest_offset)
    header.digest = replay::digest(place + sizeof header, header.bytes - sizeof header);
  std::memcpy(place, &header, sizeof header);
}

// A device server that took over and commits: no block may reach out of the area or into a kept one.
void go_on(const LogMap& log, const Manifest& manifest, const replay::CommitEntry& entry) {
  server::ShadowArea area(log.shadows());
  area.adopt({{&manifest, &entry, entry.number}});
  std::map<uint64_t, uint64_t> kept{{entry.manifest_offset, entry.manifest_bytes}};
  const auto keep = [&](uint64_t offset, uint64_t bytes) { kept[offset] = std::max(kept[offset], bytes); };
  for (const auto& b : manifest.buffers)
    if (b.shadow_offset != replay::kNotShadowed) keep(b.shadow_offset, b.bytes);
  for (const auto& g : manifest.generators) keep(g.shadow_offset, g.bytes);
  const auto save = [&](uint64_t bytes, uint64_t commit) {
    const auto place = area.allocate(bytes, commit);
    if (!place) return;
    require(*place <= log.shadow_bytes() && bytes <= log.shadow_bytes() - *place,
            "a new shadow reaches out of the area");
    for (const auto& [offset, size] : kept)
      require(*place + bytes <= offset || offset + size <= *place || size == 0 || bytes == 0,
              "a new shadow overlaps one that is needed");
    std::memset(area.at(*place), 0x5a, bytes);
    kept.emplace(*place, bytes);
  };
  const uint64_t next = entry.number + 1;
  for (const uint64_t bytes : {uint64_t{64}, uint64_t{1000}, entry.record_index % 8192, uint64_t{1}})
    save(bytes, next);
  kept.clear();
  area.release(next + 1);
  for (const uint64_t bytes : {uint64_t{4096}, entry.log_offset % 8192}) save(bytes, next + 1);
}

void take_over(const LogMap& log, uint64_t number) {
  const replay::CommitEntry entry = replay::commit_entry(log, number);
  const Manifest manifest = Manifest::read(log.shadows(), entry);
  require(manifest.encoded_bytes() == entry.manifest_bytes, "a manifest of another length was read");
  std::vector<uint8_t> again(manifest.encoded_bytes());
  manifest.encode(again.data());
  require(std::memcmp(again.data(), log.shadow() + entry.manifest_offset, again.size()) == 0,
          "a manifest was not read as it is written");
  go_on(log, manifest, entry);
}

}  // namespace
}  // namespace understudy::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace understudy::fuzz;
  static Log memory;
  const auto log = memory.open(data, bytes);
  if (!log) return 0;
  mend(memory, *log);
  const auto found = understudy::replay::commits(*log);
  require(found.size() < understudy::replay::kCommitRing, "more commits than the ring holds");
  for (const auto& commit : found) require(commit.number != 0, "commit 0 has no row");
  try {
    take_over(*log, memory.input.commit);
  } catch (const understudy::replay::LogError&) {
    // The one way to say no.
  }
  return 0;
}
