#include "proxy_server/csrc/executor/validation.h"

#include <algorithm>
#include <cstdio>

namespace understudy::server {
namespace {

using Digests = std::vector<std::pair<uint64_t, uint64_t>>;

// The first handle whose digests differ, or that only one of them has.
std::optional<uint64_t> first_difference(const Digests& one, const Digests& other) {
  const auto [a, b] = std::mismatch(one.begin(), one.end(), other.begin(), other.end());
  if (a == one.end() && b == other.end()) return std::nullopt;
  return a == one.end() ? b->first : a->first;
}

}  // namespace

bool Validation::at_end(DeviceState& state) {
  active_ = false;
  now_.buffers = state.content_digests();
  now_.generators = state.generator_digests();
  if (!first_) {
    first_ = std::move(now_);
    first_step_ = step_;
    now_ = {};
    return true;
  }
  compare(*first_, now_);
  first_.reset();
  return false;
}

// What is alive at the end decides; the calls say where it began.
void Validation::compare(const Pass& first, const Pass& second) {
  difference_.clear();
  differing_record_.reset();
  const auto [a, b] =
      std::mismatch(first.calls.begin(), first.calls.end(), second.calls.begin(), second.calls.end());
  if (const auto handle = first_difference(first.buffers, second.buffers))
    difference_ = "buffer " + std::to_string(*handle) + " at the end";
  else if (const auto generator = first_difference(first.generators, second.generators))
    difference_ = "generator " + std::to_string(*generator) + " at the end";
  else
    return;  // what a call left and nobody kept (padding, say) may differ
  if (a == first.calls.end() && b == second.calls.end()) return;
  const Left& left = a != first.calls.end() ? *a : *b;
  differing_record_ = left.record;
  difference_ = "buffer " + std::to_string(left.handle) + " after record " + std::to_string(left.record) +
                ", and " + difference_;
}

void Validation::publish(const std::string& message) {
  std::snprintf(page_.server().validation_message, sizeof page_.server().validation_message, "%s",
                message.c_str());
  if (!message.empty()) page_.server().validations_failed.fetch_add(1);
  page_.server().validated_step.store(step_, std::memory_order_release);
}

}  // namespace understudy::server
