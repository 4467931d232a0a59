#include "proxy_server/csrc/snapshots/shadow_area.h"

#include <algorithm>
#include <string>

namespace understudy::server {
namespace {
constexpr uint64_t kBlockAlign = 64;
uint64_t round_up(uint64_t bytes) {
  return (std::max<uint64_t>(bytes, 1) + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
}
}  // namespace

void ShadowArea::insert(uint64_t offset, uint64_t bytes, uint64_t first, uint64_t last) {
  const auto [it, fresh] = blocks_.try_emplace(offset, Block{bytes, first, last});
  if (!fresh) throw replay::LogError("two shadows share one place");
  used_ += bytes;
}

std::map<uint64_t, ShadowArea::Block>::iterator ShadowArea::erase(std::map<uint64_t, Block>::iterator it) {
  used_ -= it->second.bytes;
  free_by_size_.emplace(it->second.bytes, it->first);
  return blocks_.erase(it);
}

std::optional<uint64_t> ShadowArea::allocate(uint64_t bytes, uint64_t commit) {
  const auto offset = place(bytes, commit);
  if (!offset || backed(*offset, round_up(bytes))) return offset;
  if (!replay::reserve_memory(area_.data + *offset, round_up(bytes))) {  // /dev/shm is full
    erase(blocks_.find(*offset));
    find_free_space();
    return std::nullopt;
  }
  if (*offset <= backed_) backed_ = *offset + round_up(bytes);
  return offset;
}

std::optional<uint64_t> ShadowArea::place(uint64_t bytes, uint64_t commit) {
  bytes = round_up(bytes);
  // Training repeats itself: a freed block of the same size almost always exists. Up to 1/4 waste is
  // accepted.
  if (auto it = free_by_size_.lower_bound(bytes);
      it != free_by_size_.end() && it->first <= bytes + bytes / 4) {
    const uint64_t offset = it->second, size = it->first;
    free_by_size_.erase(it);
    insert(offset, size, commit, commit);
    return offset;
  }
  if (bytes > area_.bytes - top_) {
    find_free_space();  // forget how it was cut up; what lies behind the last block can be used again
    auto it = free_by_size_.lower_bound(bytes);
    if (it != free_by_size_.end()) {
      const uint64_t offset = it->second, size = it->first;
      free_by_size_.erase(it);
      if (size > bytes) free_by_size_.emplace(size - bytes, offset + bytes);
      insert(offset, bytes, commit, commit);
      return offset;
    }
    if (bytes > area_.bytes - top_) return std::nullopt;
  }
  const uint64_t offset = top_;
  top_ += bytes;
  insert(offset, bytes, commit, commit);
  return offset;
}

void ShadowArea::keep(uint64_t offset, uint64_t commit) {
  auto it = blocks_.find(offset);
  if (it == blocks_.end()) throw replay::LogError("a shadow was lost");
  it->second.last = std::max(it->second.last, commit);
}

void ShadowArea::release(uint64_t floor, std::span<const uint64_t> but) {
  const auto wanted = [&](const Block& b) {
    return b.last >= floor ||
           std::any_of(but.begin(), but.end(), [&](uint64_t n) { return b.first <= n && n <= b.last; });
  };
  for (auto it = blocks_.begin(); it != blocks_.end();) it = wanted(it->second) ? std::next(it) : erase(it);
}

void ShadowArea::rewind(uint64_t target) {
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.first > target) {
      it = erase(it);
      continue;
    }
    it->second.last = std::min(it->second.last, target);
    ++it;
  }
  if (top_ > backed_) find_free_space();  // which may not have got their memory
}

void ShadowArea::adopt(const std::vector<Published>& published) {
  blocks_.clear();
  used_ = 0;
  for (const Published& p : published) {
    const auto add = [&](uint64_t offset, uint64_t bytes) {
      const auto known = blocks_.find(offset);
      if (known == blocks_.end())
        insert(offset, round_up(bytes), p.number, p.number);
      else if (round_up(bytes) > known->second.bytes)
        throw replay::LogError("two shadows of commit " + std::to_string(p.number) + " share one place");
      else
        keep(offset, p.number);
    };
    add(p.entry->manifest_offset, p.entry->manifest_bytes);
    for (const auto& b : p.manifest->buffers)
      if (b.shadow_offset != replay::kNotShadowed) add(b.shadow_offset, b.bytes);
    for (const auto& g : p.manifest->generators) add(g.shadow_offset, g.bytes);
  }
  // What a hostile worker wrote there has a right digest too, but not the layout that allocate() makes.
  uint64_t end = 0;
  for (const auto& [offset, block] : blocks_) {
    if (offset % kBlockAlign != 0 || offset < end || offset > area_.bytes ||
        block.bytes > area_.bytes - offset)
      throw replay::LogError(std::string("contents in the ") + area_.name + " overlap or are out of place");
    end = offset + block.bytes;
  }
  find_free_space();
  backed_ = top_;
}

void ShadowArea::clear() {
  blocks_.clear();
  used_ = 0;
  find_free_space();
  backed_ = 0;
  replay::give_memory_back(area_.data, area_.bytes);
}

void ShadowArea::find_free_space() {
  free_by_size_.clear();
  top_ = 0;
  for (const auto& [offset, block] : blocks_) {
    if (offset > top_) free_by_size_.emplace(offset - top_, top_);
    top_ = std::max(top_, offset + block.bytes);
  }
}

}  // namespace understudy::server
