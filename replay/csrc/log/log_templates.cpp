// The worker's end of the dictionary: regions that are filled one after the other, and then used again.
//
//   filled ──▶ named (the newest kNamedRegions) ──▶ retired ──▶ released: memory given back, room for another
//
// From the moment when a region is retired no new record names a template of it; whoever still wants to is
// told, and stores the template again. It is released when the log before that moment is freed.
#include <algorithm>

#include "replay/csrc/log/log_writer.h"

namespace understudy::replay {

constexpr uint64_t kDictionaryStep = 256 << 10;

uint64_t LogWriter::put_template(std::string_view name, const uint64_t* key, size_t key_words,
                                 const uint64_t* outputs, size_t output_words) {
  const size_t padded = (name.size() + 7) / 8 * 8;
  const uint64_t bytes = sizeof(TemplateHeader) + padded + 8 * (key_words + output_words);
  if (bytes > map_.region_bytes())
    throw LogError("a call whose template has " + std::to_string(bytes) + " bytes is too large for the log");
  std::lock_guard<std::mutex> lock(dictionary_mutex_);
  uint64_t id = page().worker().dictionary_tail.load(std::memory_order_relaxed);
  if (bytes > region_end_ - id) id = open_region();
  if (id + bytes > dictionary_reserved_) {
    const uint64_t more = std::min(std::max(bytes, kDictionaryStep), region_end_ - id);
    if (!reserve_memory(map_.template_at(id), more))
      throw LogError("shared memory is full: /dev/shm has no room for more call templates");
    dictionary_reserved_ = id + more;
  }
  auto* header = reinterpret_cast<TemplateHeader*>(map_.template_at(id));
  *header = {static_cast<uint32_t>(bytes), static_cast<uint32_t>(name.size()),
             static_cast<uint32_t>(key_words), static_cast<uint32_t>(output_words)};
  uint8_t* p = reinterpret_cast<uint8_t*>(header + 1);
  std::memset(p, 0, padded);
  std::memcpy(p, name.data(), name.size());
  if (key_words != 0) std::memcpy(p + padded, key, 8 * key_words);
  if (output_words != 0) std::memcpy(p + padded + 8 * key_words, outputs, 8 * output_words);
  page().worker().dictionary_tail.store(id + bytes, std::memory_order_release);
  return id;
}

// The id that the next region begins with.
uint64_t LogWriter::open_region() {
  const uint64_t number = region_end_ / map_.region_bytes();
  release_regions();
  while (retired_regions_ + kNamedRegions <= number) retire_region(retired_regions_);
  if (number >= kTemplateRegions)
    wait_for_room([&] {
      release_regions();
      return released_regions_ > number - kTemplateRegions;
    });
  const uint64_t begin = region_end_;
  page().worker().dictionary_tail.store(begin, std::memory_order_release);
  dictionary_reserved_ = begin;
  region_end_ += map_.region_bytes();
  return begin;
}

void LogWriter::retire_region(uint64_t number) {
  std::lock_guard<QuickLock> lock(lock_);
  fill_segment();  // the log is freed by whole segments: any commit from here on can free this one
  oldest_template_ = (number + 1) * map_.region_bytes();
  retired_before_[number % kTemplateRegions] = next_segment_;
  retired_regions_ = number + 1;
}

void LogWriter::raise_retired() { throw RetiredTemplate(); }

void LogWriter::release_regions() {
  const uint64_t freed = page().server().freed_segments.load(std::memory_order_acquire);
  while (released_regions_ < retired_regions_ &&
         retired_before_[released_regions_ % kTemplateRegions] <= freed) {
    const uint64_t begin = released_regions_++ * map_.region_bytes();
    page().worker().dictionary_begin.store(begin + map_.region_bytes(), std::memory_order_release);
    give_memory_back(map_.template_at(begin), map_.region_bytes());
  }
}

}  // namespace understudy::replay
