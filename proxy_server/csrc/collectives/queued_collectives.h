// Collectives that a GPU's stream waits for: for the host they are done when their call returns, on the
// device they end when all members have come.
//
// Whoever is about to wait for the device waits here first. Then the control page says which collective it
// is, as it does where collectives block the executor, and a rank that waits for a late peer is told from one
// whose device hangs.
#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <deque>
#include <functional>
#include <string>

#include "replay/csrc/log/control_page.h"

namespace understudy::server {

// A collective as the control page names it; all 0: it cannot be named.
struct CollectiveId {
  uint64_t uid_low = 0, uid_high = 0, sequence = 0;
};

// While it lives, the server waits for peers.
class Waits {
 public:
  explicit Waits(replay::ServerPage page) : page_(page) { page_.server().in_collective.store(1); }
  Waits(replay::ServerPage page, const CollectiveId& awaited) : Waits(name(page, awaited)) {}
  ~Waits() { page_.server().in_collective.store(0); }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

 private:
  static replay::ServerPage name(replay::ServerPage page, const CollectiveId& awaited);

  const replay::ServerPage page_;
};

class QueuedCollectives {
 public:
  void add(std::string name, const CollectiveId& id, c10::intrusive_ptr<c10d::Work> work);
  // Returns when the device has passed all of them, or `aborted` or `over` says so. Throws std::runtime_error
  // if one failed.
  void wait(replay::ServerPage page, const std::atomic<bool>& aborted, const std::function<bool()>& over);
  // Whether the device has yet to pass one.
  bool under_way() const;
  void clear() { queued_.clear(); }

 private:
  struct Queued {
    std::string name;
    CollectiveId id;
    c10::intrusive_ptr<c10d::Work> work;
  };
  std::deque<Queued> queued_;  // the oldest first
};

}  // namespace understudy::server
