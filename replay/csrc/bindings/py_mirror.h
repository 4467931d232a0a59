#pragma once
#include <pybind11/pybind11.h>

namespace understudy::replay {

void bind_mirror(pybind11::module_& m);

}  // namespace understudy::replay
