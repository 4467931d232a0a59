// What a worker may have left in shared memory: the fuzzer's bytes as the contents of a rank's log.
//
// An input is an Input, zeros where it is short, and then the contents of `dictionary`, `segments` and
// `shadow`. make_seeds.py writes inputs of the same layout.
#pragma once
#include <algorithm>
#include <optional>

#include "fuzz/guarded_memory.h"
#include "replay/csrc/log/log_map.h"

namespace understudy::fuzz {

constexpr uint64_t kSegmentBytes = 4096, kMostSegments = 4, kMostRegion = 4096, kMostShadow = 16384;

struct Input {
  uint8_t segments;          // real ones, modulo kMostSegments
  uint8_t fill;              // of the control page, where nothing else is written
  uint16_t dictionary;       // bytes of a region, modulo kMostRegion
  uint16_t shadow;           // bytes of the file, modulo kMostShadow
  uint16_t dictionary_part;  // bytes of the input that go there
  uint16_t segments_part;    // bytes of the input that go there; the rest is for the shadow
  uint16_t mend;             // see Mend
  uint32_t segment_of[kMostSegments];
  uint32_t unused;
  uint64_t page_bytes, segment_bytes, segment_count, reply_bytes;  // by how they differ from the right ones
  uint64_t tail, tail_index, dictionary_tail, cursor, freed_segments, commit_count;
  uint64_t from, from_index;  // where a reader begins: a commit row said so
  uint64_t commit, manifest_offset, manifest_bytes;
  uint64_t dictionary_begin, dictionary_bytes;  // the latter by how it differs from the right one
};
static_assert(sizeof(Input) == 168);

// What a random change would never get right, and a hostile worker always.
enum Mend : uint16_t { kMagicAndBytes = 1, kDigest = 2 };

// The memory of one log, used again for every input.
class Log {
 public:
  static constexpr uint64_t kPageBytes = (sizeof(replay::ControlPage) + 4095) / 4096 * 4096;
  static constexpr uint64_t kReplyBytes = 4096;

  // Nothing if the log is refused.
  std::optional<replay::LogMap> open(const uint8_t* data, size_t bytes) {
    input = {};
    const uint8_t* const end = data + bytes;
    data += put(data, end, reinterpret_cast<uint8_t*>(&input), sizeof input);
    const uint64_t segments_bytes = kSegmentBytes * (input.segments % kMostSegments + 1);
    const uint64_t dictionary_bytes = replay::kTemplateRegions * (input.dictionary % kMostRegion / 8 * 8 + 8);
    const uint64_t shadow_bytes = input.shadow % kMostShadow / 8 * 8 + 4096;
    uint8_t* const control = control_.take(kPageBytes + kReplyBytes);
    uint8_t* const dictionary = dictionary_.take(dictionary_bytes);
    uint8_t* const segments = segments_.take(segments_bytes);
    shadow_begin = shadow_.take(shadow_bytes);
    data += put(data, end, dictionary, std::min<uint64_t>(dictionary_bytes, input.dictionary_part));
    data += put(data, end, segments, std::min<uint64_t>(segments_bytes, input.segments_part));
    put(data, end, shadow_begin, shadow_bytes);
    fill_page(*reinterpret_cast<replay::ControlPage*>(control), segments_bytes / kSegmentBytes,
              dictionary_bytes);
    try {
      return std::optional<replay::LogMap>(
          std::in_place, "the log", replay::Mapping(control, kPageBytes + kReplyBytes),
          replay::Mapping(dictionary, dictionary_bytes), replay::Mapping(segments, segments_bytes),
          replay::Mapping(shadow_begin, shadow_bytes));
    } catch (const replay::LogError&) {
      return std::nullopt;
    }
  }

  Input input{};
  uint8_t* shadow_begin = nullptr;

 private:
  static uint64_t put(const uint8_t* data, const uint8_t* end, uint8_t* to, uint64_t most) {
    const uint64_t bytes = std::min<uint64_t>(most, static_cast<uint64_t>(end - data));
    if (bytes != 0) std::memcpy(to, data, bytes);
    return bytes;
  }

  void fill_page(replay::ControlPage& page, uint64_t segments, uint64_t dictionary_bytes) const {
    std::memset(static_cast<void*>(&page), input.fill, kPageBytes + kReplyBytes);
    page.fixed.magic = replay::kMagic;
    page.fixed.version = replay::kVersion;
    page.fixed.page_bytes = static_cast<uint32_t>(kPageBytes ^ input.page_bytes);
    page.fixed.segment_bytes = kSegmentBytes ^ input.segment_bytes;
    page.fixed.segment_count = segments ^ input.segment_count;
    page.fixed.reply_bytes = kReplyBytes ^ input.reply_bytes;
    page.worker.tail = input.tail;
    page.worker.tail_index = input.tail_index;
    page.worker.dictionary_tail = input.dictionary_tail;
    page.worker.dictionary_begin = input.dictionary_begin;
    page.fixed.dictionary_bytes = dictionary_bytes ^ input.dictionary_bytes;
    page.server.cursor = input.cursor;
    page.server.freed_segments = input.freed_segments;
    page.server.commit_count = input.commit_count;
    std::copy(input.segment_of, input.segment_of + kMostSegments, page.segments.of);
    replay::CommitEntry& e = page.server.commits[input.commit % replay::kCommitRing];
    e.number = input.commit;
    e.log_offset = input.from;
    e.record_index = input.from_index;
    e.manifest_offset = input.manifest_offset;
    e.manifest_bytes = input.manifest_bytes;
  }

  GuardedMemory control_{kPageBytes + kReplyBytes}, dictionary_{kMostRegion * replay::kTemplateRegions},
      segments_{kSegmentBytes * kMostSegments}, shadow_{kMostShadow + 4096};
};

}  // namespace understudy::fuzz
