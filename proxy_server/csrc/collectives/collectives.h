// Communicators and the collectives in flight on them.
//
// A collective is started when its record is reached and runs beside later records; whoever touches one of
// its buffers waits for it first. So the worker's Work::wait() needs no record, but for one that tells which
// of a script's streams waits, and communication overlaps computation.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <list>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "proxy_server/csrc/calls/words.h"
#include "proxy_server/csrc/collectives/collective_calls.h"
#include "proxy_server/csrc/collectives/queued_collectives.h"
#include "proxy_server/csrc/collectives/waiters.h"
#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/state/storage_store.h"
#include "replay/csrc/rewind/marks.h"
#include "replay/csrc/rewind/rewind.h"

namespace understudy::server {

using BufferTable = replay::BufferTable<Content, StorageStore>;
class DeviceState;

// A peer or the network failed, not the program (as far as can be told here).
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct BackendRequest {
  std::string uid;  // 32 hexadecimal digits, the same on every member
  uint32_t generation;
  int64_t rank, size, timeout_ms;
};
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>;

class Communicators {
 public:
  Communicators(const Driver& driver, replay::LogMap& log, BackendFactory factory)
      : driver_(driver), log_(log), page_(log.server_page()), factory_(std::move(factory)) {}

  void create(uint64_t handle, Words body);
  void destroy(uint64_t handle, BufferTable& table);
  void start(uint64_t handle, Words body, DeviceState& state);

  // Whether a group of calls has begun and not ended: no place to stand still at, or for a commit.
  bool in_group() const { return group_.has_value(); }

  // Waits for what works on a buffer, and for nothing else: a peer may begin the rest only behind what comes
  // next.
  void wait_for(uint64_t buffer, BufferTable& table);
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // What a communicator was given last: one call, or those of a group. For streams of a GPU.
  Works newest(uint64_t communicator) const;
  void forget_newest();  // the device has passed them, and they hold memory
  // On the calling thread's current stream.
  void wait_for_works(const Works& works, BufferTable& table);
  // For the newest barrier of a communicator, if there is one.
  void wait_for_barrier(uint64_t communicator, BufferTable& table);
  void wait_for_all(BufferTable& table);
  // For what was waited for above and on a GPU has only been queued: see Driver::before_waiting. Returns
  // early if it is aborted, or `over` says so; throws CollectiveError if it failed.
  void wait_for_queued(const std::function<bool()>& over);
  // Finishes whatever has ended by itself; whether nothing is under way.
  bool settled(BufferTable& table);
  // After abort(): lets the broken collectives end and forgets them.
  void forget_in_flight(BufferTable& table);
  // From any thread: whoever waits for a peer gets an error at once.
  void abort();
  // abort() struck a communicator, and nothing was forgotten since: its buffers may hold anything.
  bool cut_short() const { return cut_short_.load(); }
  // A commit would wait for peers: also for what only a stream of the script's waits for by now.
  bool under_way() const {
    return !in_flight_.empty() || in_group() || (driver_.streams().several() && queued_.under_way());
  }
  // For drills: the next collective that is waited for never ends; no peer can be reached any more.
  void hang_once() { hang_next_ = true; }
  void cut_off();

  // Once for each commit: also tells what was given up since the one before.
  replay::Marks marks();
  std::vector<replay::ManifestCommunicator> manifest() const;
  void restore(const std::vector<replay::ManifestCommunicator>& rows);  // connects nothing
  // Connects all communicators that were in use: on processors at once, NCCL's in an order all members share.
  // Returns how many.
  uint32_t rebuild(uint32_t generation);
  // The same as far as other threads can do it; rebuild() waits for them.
  void begin_rebuild(uint32_t generation);
  void set_generation(uint32_t generation) { generation_ = generation; }
  void close();

 private:
  // A call under way. Calls of one communicator must start in their order, on whichever threads.
  struct Running {
    explicit Running(CollectiveCall given) : call(std::move(given)) {}
    CollectiveCall call;
    c10::intrusive_ptr<c10d::Work> work;
    Event started;
  };
  struct Connecting {  // on a thread of its own
    std::shared_ptr<Waiting> waiting;
    c10::intrusive_ptr<c10d::Backend> backend;
  };
  struct Communicator {
    uint64_t uid_low = 0, uid_high = 0, rank = 0, size = 0, timeout_ms = 0;
    uint64_t sequence = 0;                       // collectives of all members
    std::map<uint64_t, uint64_t> peer_sequence;  // sends and receives with one peer
    std::map<uint64_t, uint64_t> sent;           // the sends among them
    bool met_in_group = false;  // all members met for a group of messages, before any collective
    c10::intrusive_ptr<c10d::Backend> backend;
    std::set<std::optional<int64_t>> reached;  // by NCCL: all members (none is named), and single ones
    std::shared_ptr<Connecting> connecting;    // from its first use until there is a backend
    std::shared_ptr<Running> deferred;         // the last call that waits for that
    Works newest;
  };
  struct InFlight {
    c10::intrusive_ptr<c10d::Work> work;  // none while it waits to be started
    std::vector<uint64_t> buffers;
    std::function<void()> finish;  // on the executor's thread, when the work is done
    std::string name;
    uint64_t communicator = 0;
    std::function<void()> wait{};        // for a message
    std::shared_ptr<Waiting> waiting{};  // of a message, or of what is not started
    bool may_miss_abort = false;         // see ends()
    CollectiveId id{};
  };
  struct Begun {
    InFlight in_flight;
    std::shared_ptr<Running> running;
    uint64_t peer;
  };
  // Calls that the backend is to start together, when their last one is known: until then it knows of none,
  // and a log that leaves a group open harms nobody.
  struct Group {
    uint64_t communicator;
    std::vector<Begun> calls;
  };

  static bool used(const Communicator& c) { return c.sequence != 0 || !c.peer_sequence.empty(); }
  static replay::Marks marks_of(const Communicator& c);
  c10d::Backend& connected(Communicator& c);
  void reach(Communicator& c, std::optional<int64_t> peer);
  void begin_connecting(Communicator& c);
  std::vector<Communicator*> in_use();
  bool adopt_connection(Communicator& c);
  void begin_group(uint64_t communicator, BufferTable& table);
  void start_group(BufferTable& table);  // if one is open; it is not any more
  void put_in_flight(Communicator& c, Begun begun, BufferTable& table);
  void ask_backend(const std::function<void()>& start) const;
  bool reachable() const;
  void check_reachable() const;
  BackendRequest request_for(const Communicator& c) const;
  void finish(std::list<InFlight>::iterator f, BufferTable& table, bool told = false);
  void wait(InFlight& f);
  static bool is_over(InFlight& f);
  static uint64_t deadline_after_abort();
  bool ends(InFlight& f, uint64_t until_ns) const;
  void publish_started();

  const Driver& driver_;
  replay::LogMap& log_;
  const replay::ServerPage page_;
  BackendFactory factory_;
  uint32_t generation_ = 0;
  std::map<uint64_t, Communicator> communicators_;
  replay::Marks given_up_;           // since the last commit
  std::list<InFlight> in_flight_;    // the oldest first
  std::optional<Group> group_;       // between its begin and its end
  QueuedCollectives queued_;         // no longer in flight for the host
  std::vector<InFlight> abandoned_;  // aborted, and still not ended
  std::vector<c10::intrusive_ptr<c10d::Backend>> abandoned_backends_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> cut_short_{false};
  bool hang_next_ = false;
  mutable std::mutex backends_mutex_;  // abort() comes from another thread
};

}  // namespace understudy::server
