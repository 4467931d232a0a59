// Rolling a rank forward to the end of an optimizer step that its former server did not live to finish.
//
// The rank stands at the commit where the step begins, but for buffers whose content is that of the step's
// end already: it came from a replica that got there (`rolled`). Calls that need nothing of them run as
// always. A call that would read or change one of them is not run: what it would have made of rolled buffers
// they hold already, and whatever else it would have made has no content (`tainted`).
//
// That is right only if the replica did the same with the same contents, which the digests of both steps
// tell at its end. So nothing that the replica does not hold too (`own`, and what comes from it) may go into
// a rolled buffer, every rolled buffer must be changed by the program here as well, and no value of a call
// that was not run may be told, or outlive the step.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "proxy_server/csrc/calls/call_template.h"
#include "proxy_server/csrc/state/device_state.h"

namespace understudy::server {

// The step cannot be finished in this way; the state is of no use any more.
struct RollForwardRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class RollForward {
 public:
  struct Contents {
    std::vector<uint64_t> rolled;  // of the end of the step
    std::vector<uint64_t> steady;  // of its beginning, and of its end as well
    std::vector<uint64_t> own;     // the replica does not hold it at the beginning
    std::vector<uint64_t> lost;    // it could not be had
    uint64_t step_digest;          // of the replica's step, see step_digest.h
  };

  // The state is that of the commit at which the step begins, but for these. Throws LogError if it is not.
  void begin(const Contents& contents, DeviceState& state);
  bool active() const { return active_; }

  // Each of these: whether the record is to be run; else it was dealt with here. Throw RollForwardRefused.
  bool runs_operator(const Template& t, Words words, DeviceState& state);
  bool runs_upload(uint64_t handle);
  bool runs_read(uint64_t handle, bool told_already) const;
  void check_sync_operator(const Template& t, Words words);
  void check_resize(uint64_t handle) const;
  // It ran: what it made, from this handle on.
  void note_results(uint64_t first_handle, DeviceState& state);

  void forget(uint64_t handle) { marks_.erase(handle); }
  // The step's commit is about to be made. Throws RollForwardRefused if the state is not the program's.
  void finish(DeviceState& state, uint64_t step_digest);

 private:
  enum Mark : uint8_t { kRolled = 1, kTainted = 2, kOwn = 4, kSteady = 8, kChanged = 16 };
  uint8_t mark_of(uint64_t handle) const {
    const auto known = marks_.find(handle);
    return known == marks_.end() ? 0 : known->second;
  }
  void skip(const Template& t, const struct Footprint& call, bool own, DeviceState& state);

  bool active_ = false;
  uint64_t step_digest_ = 0;
  bool own_results_ = false;  // of the synchronous call that runs
  std::unordered_map<uint64_t, uint8_t> marks_;
};

}  // namespace understudy::server
