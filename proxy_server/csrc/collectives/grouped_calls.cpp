// Calls that start together. A GPU's communicator runs one after the other what it is given one by one: two
// ranks that both send first would wait for each other for good.
#include <optional>
#include <utility>

#include "proxy_server/csrc/collectives/collectives.h"

namespace understudy::server {

void Communicators::begin_group(uint64_t communicator, BufferTable& table) {
  start_group(table);                     // no worker of ours leaves one open
  if (driver_.device().is_cpu()) return;  // Gloo's messages do not wait for one another
  group_.emplace(Group{communicator, {}});
}

void Communicators::start_group(BufferTable& table) {
  const std::optional<Group> group = std::exchange(group_, std::nullopt);
  if (!group || group->calls.empty()) return;
  Communicator& c = communicators_.at(group->communicator);
  ask_backend([&] {
    c10d::Backend& backend = connected(c);
    const Waits waits(page_);
    reach(c, std::nullopt);
    const bool together = backend.supportsCoalescing();
    if (together) backend.startCoalescing();
    try {
      for (const Begun& begun : group->calls) begun.running->work = start_on(begun.running->call, backend);
    } catch (const std::exception&) {
      if (together) backend.endCoalescing();  // NCCL's is open for all that this thread calls
      throw;
    }
    if (!together) return;
    const auto work = backend.endCoalescing();
    TORCH_CHECK(work, "the backend started none of a group's calls");
    for (const Begun& begun : group->calls) begun.running->work = work;
  });
  c.newest.clear();
  // As natively: where this is what a communicator is first used for by all, all of them have to call it.
  if (c.sequence == 0) c.met_in_group = true;
  for (Begun begun : group->calls) {
    if (c.newest.empty() || c.newest.back() != begun.running->work) c.newest.push_back(begun.running->work);
    begun.in_flight.work = begun.running->work;
    put_in_flight(c, std::move(begun), table);
  }
  publish_started();
}

// Its errors are the peers' or the network's, but for those of a log and of a driver that is lost.
void Communicators::ask_backend(const std::function<void()>& start) const {
  try {
    start();
  } catch (const replay::LogError&) {
    throw;
  } catch (const c10::Error& e) {
    if (driver_.lost(e)) throw;
    throw CollectiveError(e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw CollectiveError(e.what());
  }
}

}  // namespace understudy::server
