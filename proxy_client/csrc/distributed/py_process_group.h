#pragma once
#include <pybind11/pybind11.h>

namespace understudy::client {

// Adds `_UnderstudyProcessGroup` to torch._C._distributed_c10d, where its base class `Backend` is known.
void register_process_group(pybind11::module_ distributed);

}  // namespace understudy::client
