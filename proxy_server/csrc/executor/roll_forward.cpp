#include "proxy_server/csrc/executor/roll_forward.h"

#include <ATen/core/enum_tag.h>

#include "proxy_server/csrc/calls/call_values.h"

namespace understudy::server {

using replay::LogError;

// What a call uses, without running it: a visitor of its values.
struct Footprint {
  std::vector<uint64_t> read, written;
  std::vector<std::pair<uint64_t, uint64_t>> results;  // handle, bytes
  bool draws = false;                                  // random numbers
  bool host_content = false;  // a tensor of the worker's host, of which nobody knows whether replicas had it

  void tensor(uint64_t handle, bool is_written) { (is_written ? written : read).push_back(handle); }
  void host(const uint8_t*, uint64_t, bool wrapped_number) { host_content = host_content || !wrapped_number; }
  void numbers(const uint64_t*, uint64_t) {}
  void generator(uint64_t) { draws = true; }
  void composite() { throw RollForwardRefused("a call takes a sparse or nested tensor"); }
};

namespace {

Footprint footprint_of(const Template& t, Words& words) {
  Footprint call;
  visit_values(t, words, call);
  call.draws = call.draws || t.op.hasTag(at::Tag::nondeterministic_seeded);
  return call;
}

std::string named(uint64_t handle) { return "buffer " + std::to_string(handle); }

}  // namespace

void RollForward::begin(const Contents& contents, DeviceState& state) {
  marks_.clear();
  const auto mark = [&](const std::vector<uint64_t>& handles, uint8_t with, bool available) {
    for (const uint64_t handle : handles) {
      const BufferTable::Buffer* b = state.table().find(handle);
      if (b == nullptr || (available && !b->available))
        throw LogError(named(handle) + " is to be rolled forward, but has no content");
      marks_[handle] |= with;
    }
  };
  mark(contents.rolled, kRolled, true);
  mark(contents.steady, kSteady, true);
  mark(contents.own, kOwn, false);
  mark(contents.lost, kTainted, false);
  for (const uint64_t handle : contents.lost) state.mark_lost(handle);
  step_digest_ = contents.step_digest;
  state.table().seal();  // its memory is not that of the commit
  active_ = true;
}

bool RollForward::runs_operator(const Template& t, Words words, DeviceState& state) {
  Footprint call = footprint_of(t, words);
  for (const ReturnSpec& want : t.returns)
    if (want.kind != 0)
      for (const OutputSpec& item : want.items)
        if (item.fresh) call.results.emplace_back(words.next(), item.storage_bytes);
  uint8_t all = 0;
  for (const uint64_t handle : call.read) all |= mark_of(handle);
  for (const uint64_t handle : call.written) all |= mark_of(handle);
  const bool own = (all & kOwn) != 0 || call.host_content || call.draws;
  if ((all & (kRolled | kTainted)) != 0) {
    skip(t, call, own, state);
    return false;
  }
  for (const uint64_t handle : call.written)
    if (own || mark_of(handle) != 0) marks_[handle] = own ? kOwn : 0;
  if (own)
    for (const auto& [handle, bytes] : call.results) marks_[handle] = kOwn;
  return true;
}

void RollForward::skip(const Template& t, const Footprint& call, bool own, DeviceState& state) {
  if (call.draws) throw RollForwardRefused(t.name + " would have drawn random numbers");
  if (t.name.rfind("aten::", 0) != 0)
    throw RollForwardRefused("nobody knows what else " + t.name + " would have done");
  for (const uint64_t handle : call.written) {
    if (state.table().find(handle) == nullptr) throw LogError("unknown handle " + std::to_string(handle));
    uint8_t& mark = marks_[handle];
    if ((mark & (kRolled | kSteady)) == 0) {
      mark |= kTainted | (own ? kOwn : 0);
      state.mark_lost(handle);
      continue;
    }
    if (own)
      throw RollForwardRefused(t.name + " would have put into " + named(handle) +
                               " what its replica does not hold");
    mark = kRolled | kChanged;
  }
  for (const auto& [handle, bytes] : call.results) {
    state.create_without_content(handle, bytes);
    marks_[handle] = kTainted | (own ? kOwn : 0);
  }
}

bool RollForward::runs_upload(uint64_t handle) {
  const uint8_t mark = mark_of(handle);
  if ((mark & kRolled) != 0) throw RollForwardRefused("the worker writes into " + named(handle) + " itself");
  if ((mark & kTainted) != 0) return false;
  marks_[handle] = kOwn;
  return true;
}

bool RollForward::runs_read(uint64_t handle, bool told_already) const {
  if ((mark_of(handle) & (kRolled | kTainted)) == 0) return true;
  if (!told_already) throw RollForwardRefused("the worker asks for the content of " + named(handle));
  return false;
}

void RollForward::check_sync_operator(const Template& t, Words words) {
  const Footprint call = footprint_of(t, words);
  uint8_t all = 0;
  for (const uint64_t handle : call.read) all |= mark_of(handle);
  for (const uint64_t handle : call.written) all |= mark_of(handle);
  if ((all & (kRolled | kTainted)) != 0) throw RollForwardRefused("the worker waits for " + t.name);
  own_results_ = (all & kOwn) != 0 || call.host_content || call.draws;
  for (const uint64_t handle : call.written)
    if (own_results_ || mark_of(handle) != 0) marks_[handle] = own_results_ ? kOwn : 0;
}

void RollForward::note_results(uint64_t first_handle, DeviceState& state) {
  for (uint64_t handle = first_handle; own_results_ && state.table().find(handle) != nullptr; handle++)
    marks_[handle] = kOwn;
}

void RollForward::check_resize(uint64_t handle) const {
  if ((mark_of(handle) & (kRolled | kTainted | kSteady)) != 0)
    throw RollForwardRefused(named(handle) + " changes its size");
}

void RollForward::finish(DeviceState& state, uint64_t step_digest) {
  for (const auto& [handle, mark] : marks_) {
    if (state.table().find(handle) == nullptr) continue;
    if ((mark & kTainted) != 0)
      throw RollForwardRefused("the content of " + named(handle) + " outlives the step, and nobody has it");
    if ((mark & kRolled) != 0 && (mark & kChanged) == 0)
      throw RollForwardRefused("this rank did not change " + named(handle) +
                               " in the step, as its replica did");
  }
  if (step_digest == 0 || step_digest != step_digest_)
    throw RollForwardRefused("the step of its replica was another one");
  marks_.clear();
  active_ = false;
}

}  // namespace understudy::server
