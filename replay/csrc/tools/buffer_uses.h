// Which buffers a record names, and as what, by its words and its template alone. The worker may be hostile.
#pragma once
#include <array>
#include <functional>

#include "replay/csrc/log/log_map.h"
#include "replay/csrc/log/words.h"
#include "replay/csrc/tools/element_types.h"

namespace understudy::replay {

struct BufferUse {
  static constexpr uint64_t kMostSizes = 16;
  // What becomes of it: nothing that is known without the operator's schema, made, or, of a call that was
  // waited for, a handle from which on results may have been made (handles.h).
  enum class How : uint8_t { kNamed, kMade, kResultsFrom };

  uint64_t handle = 0;
  How how = How::kNamed;
  const ElementType* type = nullptr;  // null: the record does not say
  uint64_t dimensions = 0;
  std::array<uint64_t, kMostSizes> sizes{};  // of the first of them
  uint64_t bytes = 0;                        // where there is no type: so many are allocated or copied
};

// `body`: the record's words behind the handles that it frees. Throws LogError at what makes no sense, after
// what came before was seen.
void for_each_buffer(const LogMap& log, Kind kind, uint64_t aux, Words body,
                     const std::function<void(const BufferUse&)>& see);

}  // namespace understudy::replay
