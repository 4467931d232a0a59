#include "recovery/snapshots/csrc/testing/parallel_io.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace understudy::persistence {
namespace {

void check(const BlockPlan& plan) {
  if (plan.block == 0 || plan.threads == 0 || plan.depth == 0)
    throw StorageError(EINVAL, "blocks, threads and depth are at least 1");
}

std::vector<uint64_t> order_of(const BlockPlan& plan) {
  std::vector<uint64_t> order((plan.bytes + plan.block - 1) / plan.block);
  std::iota(order.begin(), order.end(), 0);
  if (plan.seed != 0) std::shuffle(order.begin(), order.end(), std::mt19937_64(plan.seed));
  return order;
}

}  // namespace

void in_threads(uint32_t threads, const std::function<void(uint64_t, uint64_t)>& work) {
  std::vector<std::exception_ptr> thrown(threads);
  {
    std::vector<std::jthread> running;
    for (uint32_t i = 0; i < threads; i++)
      running.emplace_back([&, i] {
        try {
          work(i, threads);
        } catch (...) {
          thrown[i] = std::current_exception();
        }
      });
  }
  for (const std::exception_ptr& one : thrown)
    if (one) std::rethrow_exception(one);
}

void write_blocks(Storage& storage, uint64_t offset, const uint8_t* data, const BlockPlan& plan) {
  check(plan);
  const std::vector<uint64_t> order = order_of(plan);
  in_threads(plan.threads, [&](uint64_t first, uint64_t step) {
    const std::unique_ptr<Writer> writer = storage.writer();
    const uint32_t depth = std::min(plan.depth, writer->depth());
    uint32_t under_way = 0;
    for (uint64_t i = first; i < order.size(); i += step) {
      if (under_way == depth) writer->wait(), under_way--;
      const uint64_t at = order[i] * plan.block;
      writer->submit(offset + at, data + at, std::min(plan.block, plan.bytes - at), i);
      under_way++;
    }
    for (; under_way > 0; under_way--) writer->wait();
  });
}

void read_blocks(const Storage& storage, uint64_t offset, uint8_t* data, const BlockPlan& plan) {
  check(plan);
  const std::vector<uint64_t> order = order_of(plan);
  in_threads(plan.threads, [&](uint64_t first, uint64_t step) {
    for (uint64_t i = first; i < order.size(); i += step) {
      const uint64_t at = order[i] * plan.block;
      storage.read(offset + at, data + at, std::min(plan.block, plan.bytes - at));
    }
  });
}

}  // namespace understudy::persistence
