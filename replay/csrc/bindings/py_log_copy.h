#pragma once
#include <pybind11/pybind11.h>

namespace understudy::replay {

void bind_log_copy(pybind11::module_& m);

}  // namespace understudy::replay
