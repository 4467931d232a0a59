// What an optimizer step does, in one number: the digest of its records and of what they use. Two ranks whose
// steps have the same one computed the same from the same, so that what one of them has is what the other
// would have. (A paper's replica "did the same"; this is how it is known.)
//
// Handles are numbered by their first use in the step, as each rank has others, and stand for the content
// that they had where the step began. What tells the worker something, or only lets go of something, does not
// count.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "proxy_server/csrc/calls/call_template.h"
#include "proxy_server/csrc/calls/template_cache.h"
#include "replay/csrc/rewind/rewind.h"

namespace understudy::server {

class DeviceState;

class StepDigest {
 public:
  // A step begins behind the newest commit.
  void begin();
  bool active() const { return active_; }
  // A record of the step, before it is run; `words`: its body behind what is free'd and the reply's words.
  void add(const replay::Record& r, Words words, TemplateCache& templates, DeviceState& state);
  // The step ended: its digest until the next one begins, or 0 if there is none.
  void end();
  uint64_t value() const { return active_ ? 0 : value_; }
  // Whatever was under way is over.
  void reset() { *this = {}; }

 private:
  struct See;
  uint64_t name(uint64_t handle, DeviceState& state);

  bool active_ = false;
  uint64_t value_ = 0;  // 0: not to be known
  std::unordered_map<uint64_t, uint64_t> numbers_;
  std::vector<uint64_t> words_;  // of the record
};

}  // namespace understudy::server
