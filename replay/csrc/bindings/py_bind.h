// The parts of the module replay._replay.
#pragma once
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

using LogClass = pybind11::class_<LogMap>;

template <class T>
uint64_t load(const std::atomic<T>& value) {
  return value.load(std::memory_order_acquire);
}

LogClass bind_log(pybind11::module_& m);
// What they add to it.
void bind_commits(pybind11::module_& m, LogClass& log);
void bind_snapshots(pybind11::module_& m, LogClass& log);

void bind_log_copy(pybind11::module_& m);
void bind_log_walk(pybind11::module_& m);
void bind_log_writer(pybind11::module_& m);
void bind_life_watch(pybind11::module_& m);
void bind_mirror(pybind11::module_& m);
void bind_rewind(pybind11::module_& m);

}  // namespace understudy::replay
