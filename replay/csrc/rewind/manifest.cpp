#include "replay/csrc/rewind/manifest.h"

#include <cstring>

#include "replay/csrc/digest/digest.h"

namespace understudy::replay {
namespace {

template <class T>
uint8_t* put(uint8_t* to, const std::vector<T>& items) {
  if (!items.empty()) std::memcpy(to, items.data(), items.size() * sizeof(T));
  return to + items.size() * sizeof(T);
}

template <class T>
const uint8_t* take(const uint8_t* from, uint64_t count, std::vector<T>& items) {
  items.resize(count);
  if (count != 0) std::memcpy(items.data(), from, count * sizeof(T));
  return from + count * sizeof(T);
}

}  // namespace

uint64_t Manifest::encoded_bytes() const {
  return sizeof(ManifestHeader) + buffers.size() * sizeof(ManifestBuffer) +
         generators.size() * sizeof(ManifestGenerator) + communicators.size() * sizeof(ManifestCommunicator) +
         settings.size() * sizeof(ManifestSetting);
}

void Manifest::encode(uint8_t* to) const {
  ManifestHeader header{kManifestMagic,       commit,          buffers.size(),  generators.size(),
                        communicators.size(), settings.size(), encoded_bytes(), 0};
  uint8_t* p = put(to + sizeof header, buffers);
  p = put(p, generators);
  p = put(p, communicators);
  put(p, settings);
  header.digest = digest(to + sizeof header, header.bytes - sizeof header);
  std::memcpy(to, &header, sizeof header);
}

Manifest Manifest::read(const Area& area, const CommitEntry& entry) {
  const std::string name = "the manifest of commit " + std::to_string(entry.number);
  const uint64_t limit = area.bytes;
  if (entry.manifest_bytes == 0)
    throw LogError("commit " + std::to_string(entry.number) + " has no manifest");
  if (entry.manifest_bytes < sizeof(ManifestHeader) || entry.manifest_offset > limit ||
      entry.manifest_bytes > limit - entry.manifest_offset || entry.manifest_offset % 8 != 0)
    throw LogError(name + " lies outside the " + area.name);
  const uint8_t* const place = area.data + entry.manifest_offset;
  const auto h = copy_once(*reinterpret_cast<const ManifestHeader*>(place));
  if (h.magic == kOldManifestMagic)
    throw LogError(name + " is that of an older release, whose digests are other ones");
  constexpr uint64_t kMost = 1ull << 32;
  if (h.magic != kManifestMagic || h.bytes != entry.manifest_bytes || h.commit != entry.number ||
      h.buffers > kMost || h.generators > kMost || h.communicators > kMost || h.settings > kMost ||
      h.bytes != sizeof h + h.buffers * sizeof(ManifestBuffer) + h.generators * sizeof(ManifestGenerator) +
                     h.communicators * sizeof(ManifestCommunicator) + h.settings * sizeof(ManifestSetting))
    throw LogError(name + " is damaged (header)");
  // The content is copied before its digest is taken, too: it may not become another one behind that.
  const std::vector<uint8_t> content(place + sizeof h, place + h.bytes);
  const uint8_t* p = content.data();
  if (digest(p, h.bytes - sizeof h) != h.digest) throw LogError(name + " is damaged (digest)");
  Manifest m;
  m.commit = h.commit;
  p = take(p, h.buffers, m.buffers);
  p = take(p, h.generators, m.generators);
  p = take(p, h.communicators, m.communicators);
  take(p, h.settings, m.settings);
  const auto inside = [&](uint64_t offset, uint64_t bytes) {
    return offset <= limit && bytes <= limit - offset;
  };
  for (const ManifestBuffer& b : m.buffers)
    if (b.shadow_offset != kNotShadowed && !inside(b.shadow_offset, b.bytes))
      throw LogError(name + " names a shadow outside the " + area.name);
  for (const ManifestGenerator& g : m.generators)
    if (!inside(g.shadow_offset, g.bytes))
      throw LogError(name + " names a generator outside the " + area.name);
  return m;
}

}  // namespace understudy::replay
