// Sparse and nested tensors in records: made of dense ones, rebuilt for one call, checked as if their author
// were hostile.
#pragma once
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "proxy_server/csrc/calls/call_template.h"
#include "proxy_server/csrc/calls/words.h"
#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/state/device_state.h"

namespace understudy::server {

// The storage of each device tensor that a call was given, and its handle.
using ArgumentStorages = std::vector<std::pair<const c10::StorageImpl*, uint64_t>>;

// What a template says of a sparse argument.
struct CompositeSpec {
  c10::Layout layout = c10::kSparse;
  int64_t sparse_dim = 0;   // of layout kSparse
  uint64_t nested_dim = 0;  // of each component
  c10::ScalarType dtype{};
  std::vector<int64_t> sizes;
};

inline bool is_composite(replay::Tag tag) {
  return tag == replay::Tag::kSparse || tag == replay::Tag::kSparseCompressed || tag == replay::Tag::kNested;
}

// The rest of a composite's template words, behind `word`. Throws replay::LogError if they make no sense.
ArgumentSpec parse_composite(uint64_t word, Words& words);

// Reads the composite's values and builds the tensor; its pieces are added to `storages`. Throws
// replay::LogError if the pieces do not fit together, and c10::Error if their content would let a kernel
// reach outside them: an index outside the sizes, a claim to be coalesced that is not true.
at::Tensor rebuild_composite(const ArgumentSpec& argument, Words& words, DeviceState& state,
                             const Driver& driver, ArgumentStorages* storages);

}  // namespace understudy::server
