// Validation of the log (paper 001, section 4.1): a minibatch is executed, taken back and executed again; its
// state must then be the same, bit for bit. That shows that replay would repair it. It ends with its
// optimizer step; where that keeps no pre-images, right before it. A rank alone, which keeps none at all,
// goes back by a snapshot of the minibatch's beginning.
//
//   begin ──(records)──▶ at_end: first pass ──▶ proxyd takes all ranks back ──▶ begin ──(records)──▶ at_end:
//   verdict
#pragma once
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "proxy_server/csrc/state/device_state.h"

namespace understudy::server {

// Thrown where the executor is to stand still until proxyd has taken all ranks back.
struct ValidationPause : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Validation {
 public:
  explicit Validation(replay::ServerPage page) : page_(page) {}

  // A minibatch begins, or is begun again. Cheap unless proxyd has asked for its validation.
  void begin(uint64_t step) {
    active_ = page_.shared().validate_step.load(std::memory_order_relaxed) == step &&
              page_.server().validated_step.load(std::memory_order_relaxed) < step;
    if (step > first_step_) first_.reset();  // ranks may be taken back to earlier minibatches than this one
    step_ = step;
    now_ = {};
  }
  bool active() const { return active_; }
  bool has_first() const { return first_.has_value(); }
  // Nothing is found out about this minibatch; peers that stand at its end learn from the order that is gone.
  void leave_out() {
    active_ = false;
    first_.reset();
    uint64_t order = step_;
    page_.shared().validate_step.compare_exchange_strong(order, 0);
  }

  // A call ended: remember what it left in the buffers that it made or changed.
  void note(uint64_t record, uint64_t handle, uint64_t digest) {
    now_.calls.push_back({record, handle, digest});
  }
  // True: the first pass is over, stand still until proxyd has taken all ranks back.
  bool at_end(DeviceState& state);
  // "" unless the passes differed.
  const std::string& difference() const { return difference_; }
  // Of the first call that differed, if a call did.
  std::optional<uint64_t> differing_record() const { return differing_record_; }
  void publish(const std::string& message);

 private:
  struct Left {
    uint64_t record, handle, digest;
    bool operator==(const Left&) const = default;
  };
  struct Pass {
    std::vector<Left> calls;
    std::vector<std::pair<uint64_t, uint64_t>> buffers;  // (handle, digest), by handle
    std::vector<std::pair<uint64_t, uint64_t>> generators;
  };
  void compare(const Pass& first, const Pass& second);

  const replay::ServerPage page_;
  bool active_ = false;
  uint64_t step_ = 0, first_step_ = 0;
  Pass now_;
  std::optional<Pass> first_;
  std::string difference_;
  std::optional<uint64_t> differing_record_;
};

}  // namespace understudy::server
