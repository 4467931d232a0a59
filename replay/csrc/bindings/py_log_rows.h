#pragma once
#include <pybind11/pybind11.h>

#include <optional>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

// Records still in the log, as dictionaries; [first, first + count) by index.
pybind11::list dump(const LogMap& log, std::optional<uint64_t> first, std::optional<uint64_t> count);

}  // namespace understudy::replay
