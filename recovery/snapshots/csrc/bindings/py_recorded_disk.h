// The recorded disk of tests, for Python.
#pragma once
#include <pybind11/pybind11.h>

#include "recovery/snapshots/csrc/testing/recorded_disk.h"

namespace understudy::persistence {

void bind_recorded_disk(pybind11::module_& m);

}  // namespace understudy::persistence
