#include "proxy_server/csrc/collectives/queued_collectives.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "replay/csrc/log/futex.h"

namespace understudy::server {
namespace {

// Who waits looks again after a part of the time that it has waited for; a server that looks too often would
// be taken for one at work, in whose collective something moves.
constexpr uint64_t kPart = 16, kAwakeNs = 50'000, kLongestNs = 5'000'000;

// NCCL's say of themselves that they failed; that nobody waits for, as the device may never end them.
void check(const std::string& name, c10d::Work& work) {
  const std::exception_ptr failed = work.exception();
  if (!failed) return;
  try {
    std::rethrow_exception(failed);
  } catch (const c10::Error&) {  // it may be the driver's
    throw;
  } catch (const std::exception& e) {
    throw std::runtime_error(name + ": " + e.what());
  }
}

}  // namespace

replay::ServerPage Waits::name(replay::ServerPage page, const CollectiveId& awaited) {
  page.server().wait_uid_low.store(awaited.uid_low, std::memory_order_relaxed);
  page.server().wait_uid_high.store(awaited.uid_high, std::memory_order_relaxed);
  page.server().wait_sequence.store(awaited.sequence, std::memory_order_relaxed);
  return page;
}

bool QueuedCollectives::under_way() const {
  return std::any_of(queued_.begin(), queued_.end(),
                     [](const Queued& one) { return !one.work->isCompleted(); });
}

// Those that have ended hold memory no longer; of two streams the older one's may end later.
void QueuedCollectives::add(std::string name, const CollectiveId& id, c10::intrusive_ptr<c10d::Work> work) {
  std::erase_if(queued_, [](const Queued& one) { return one.work->isCompleted() && !one.work->exception(); });
  queued_.push_back({std::move(name), id, std::move(work)});
}

void QueuedCollectives::wait(replay::ServerPage page, const std::atomic<bool>& aborted,
                             const std::function<bool()>& over) {
  for (; !queued_.empty(); queued_.pop_front()) {
    const Queued& first = queued_.front();
    if (!first.work->isCompleted()) {
      const Waits waits(page, first.id);
      const uint64_t since = replay::now_ns();
      while (!first.work->isCompleted()) {
        if (aborted.load() || over()) return;
        const uint64_t waited = replay::now_ns() - since;
        if (waited < kAwakeNs)
          replay::cpu_relax();
        else
          usleep(static_cast<useconds_t>(std::min(waited / kPart, kLongestNs) / 1000));
      }
    }
    check(first.name, *first.work);
  }
}

}  // namespace understudy::server
