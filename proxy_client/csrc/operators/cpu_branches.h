// Operators for which PyTorch, seeing "cuda", would take a branch that only a GPU can follow. With the cpu
// driver the worker takes the CPU's branch instead; the table is in cpu_branches.cpp.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace understudy::client {

// Name of each row's operator, and how often it was used in this process.
std::vector<std::pair<const char*, uint64_t>> cpu_branches_used();

}  // namespace understudy::client
