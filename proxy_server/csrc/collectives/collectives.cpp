#include "proxy_server/csrc/collectives/collectives.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstdio>

#include "proxy_server/csrc/calls/call_template.h"
#include "proxy_server/csrc/collectives/collective_calls.h"
#include "proxy_server/csrc/collectives/communicator_marks.h"
#include "proxy_server/csrc/state/device_state.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/names.h"

namespace understudy::server {
namespace {

using replay::CollectiveHeader;
using replay::CollectiveKind;
using replay::LogError;

constexpr std::chrono::milliseconds kPatience{200};  // with a wait that nobody may end

std::string hexadecimal(uint64_t high, uint64_t low) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return text;
}

// Backends take the elements from one piece of memory, whatever the strides say; Gloo does not look at them.
void check_dense_extent(const c10::Storage& storage, const at::Tensor& tensor) {
  const uint64_t room = storage.nbytes() / tensor.itemsize();  // extent_of() saw to it that nothing overflows
  const auto offset = static_cast<uint64_t>(tensor.storage_offset());
  if (tensor.numel() != 0 && (offset > room || static_cast<uint64_t>(tensor.numel()) > room - offset))
    throw LogError("a collective's tensor has more elements than its buffer");
}

// c10d looks only at the sum of all.
int64_t checked_split(uint64_t elements) {
  if (elements > (1ull << 40)) throw LogError("a collective splits its tensors impossibly");
  return static_cast<int64_t>(elements);
}

}  // namespace

void Communicators::create(uint64_t handle, Words body) {
  Communicator c;
  c.uid_low = body.next();
  c.uid_high = body.next();
  c.rank = body.next();
  c.size = body.next();
  c.timeout_ms = body.next();
  check_rank(c.rank, c.size);
  std::lock_guard<std::mutex> lock(backends_mutex_);
  TORCH_CHECK(communicators_.size() < replay::kMaxCommunicators, "this process has ", communicators_.size(),
              " communicators, as many as understudy keeps account of");
  if (!communicators_.emplace(handle, std::move(c)).second) throw LogError("a communicator is created twice");
}

void Communicators::destroy(uint64_t handle, BufferTable& table) {
  start_group(table);
  for (auto f = in_flight_.begin(); f != in_flight_.end();) {
    const auto next = std::next(f);
    if (f->communicator == handle) finish(f, table);
    f = next;
  }
  const auto known = communicators_.find(handle);
  if (known == communicators_.end()) throw LogError("unknown communicator " + std::to_string(handle));
  for (replay::CommunicatorMark mark : marks_of(known->second)) {
    mark.sequence = kGivenUp;
    given_up_.push_back(mark);
  }
  driver_.synchronize();  // giving up NCCL's aborts what is still queued on it
  std::lock_guard<std::mutex> lock(backends_mutex_);
  communicators_.erase(known);
}

BackendRequest Communicators::request_for(const Communicator& c) const {
  return {hexadecimal(c.uid_high, c.uid_low), generation_, static_cast<int64_t>(c.rank),
          static_cast<int64_t>(c.size), static_cast<int64_t>(c.timeout_ms)};
}

// Members may use a communicator for the first time in any order, as they may natively: whoever is the first
// does not stand still until the others come. (NCCL's are connected at once, and natively it waits there,
// too.)
void Communicators::begin_connecting(Communicator& c) {
  c.connecting = std::make_shared<Connecting>();
  c.connecting->waiting = Waiting::begin(
      [connecting = c.connecting.get(), kept = c.connecting, factory = factory_, request = request_for(c)] {
        try {
          connecting->backend = factory(request);
        } catch (const std::exception& e) {
          throw CollectiveError(std::string("cannot connect to the peers: ") + e.what());
        }
      });
}

bool Communicators::reachable() const {
  return replay::now_ns() >= page_.server().partitioned_until_ns.load();
}

void Communicators::check_reachable() const {
  if (aborted_.load()) throw CollectiveError("communication was aborted");
  if (!reachable()) throw CollectiveError("cannot connect to the peers: no route to them (a drill)");
}

c10d::Backend& Communicators::connected(Communicator& c) {
  if (!c.backend) {
    check_reachable();
    c10::intrusive_ptr<c10d::Backend> backend;
    try {
      const Waits waits(page_, {});
      backend = factory_(request_for(c));
    } catch (const std::exception& e) {
      throw CollectiveError(std::string("cannot connect to the peers: ") + e.what());
    }
    std::lock_guard<std::mutex> lock(backends_mutex_);
    c.backend = std::move(backend);
  }
  return *c.backend;
}

// NCCL connects at the first call that needs it, in the thread that makes it, and waits there for a dead peer
// for ever. So another thread makes a call for that first, and is left behind where this is aborted. (To
// connect all at once, when the group is made, would take memory for groups that are never used, and would
// make messages share a stream that have one for each peer.)
void Communicators::reach(Communicator& c, std::optional<int64_t> peer) {
  if (c.size == 1 || c.backend->getBackendName() != "nccl" || c.reached.count(peer) != 0) return;
  if (peer && static_cast<uint64_t>(*peer) == c.rank) return;  // an error, which the call itself will tell
  const auto connecting = Waiting::begin(
      [backend = c.backend, device = driver_.device(), peer] { connect_by_a_call(*backend, device, peer); });
  if (!connecting->wait([this] { return aborted_.load(); }))
    throw CollectiveError("cannot connect to the peers: communication was aborted");
  c.reached.insert(peer);
}

void Communicators::start(uint64_t handle, Words body, DeviceState& state) {
  const auto it = communicators_.find(handle);
  if (it == communicators_.end()) throw LogError("unknown communicator " + std::to_string(handle));
  Communicator& c = it->second;
  CollectiveHeader header;
  std::memcpy(&header, body.take(sizeof header / 8), sizeof header);
  if (header.kind >= replay::kCollectiveKinds)
    throw LogError("unknown collective " + std::to_string(header.kind));
  if (header.reduce_op > static_cast<uint64_t>(c10d::ReduceOp::BXOR)) throw LogError("unknown reduction");
  CollectiveCall call;
  call.kind = static_cast<CollectiveKind>(header.kind);
  if (call.kind == CollectiveKind::kGroupBegin) return begin_group(handle, state.table());
  if (call.kind == CollectiveKind::kGroupEnd) return start_group(state.table());
  call.reduce = static_cast<c10d::ReduceOp::RedOpType>(header.reduce_op);
  const bool any = call.kind == CollectiveKind::kReceiveAny;
  if (!any && header.peer >= c.size) throw LogError("a collective names a rank outside its communicator");
  call.peer = static_cast<int64_t>(header.peer);
  call.tag = static_cast<int64_t>(header.tag);

  std::vector<uint64_t> buffers;
  const auto tensors = [&](uint64_t n, bool written, std::vector<at::Tensor>& into) {
    body.count(n, 3);
    for (uint64_t i = 0; i < n; i++) {
      const uint64_t word = body.next();
      const uint64_t buffer = body.next();
      const TensorSpec spec = parse_tensor(word, body);
      const c10::Storage& storage = written ? state.write(buffer) : state.read(buffer);
      into.push_back(view_of(storage, spec));
      check_dense_extent(storage, into.back());
      buffers.push_back(buffer);
    }
  };
  tensors(header.inputs, false, call.inputs);
  tensors(header.outputs, true, call.outputs);
  body.count(header.splits);
  for (uint64_t i = 0; i < header.splits; i++)
    (i < header.splits / 2 ? call.output_splits : call.input_splits).push_back(checked_split(body.next()));

  const bool message = is_point_to_point(call.kind);
  const bool grouped = group_ && group_->communicator == handle && message && !any;
  const auto running = std::make_shared<Running>(std::move(call));
  InFlight begun{{}, std::move(buffers), {}, replay::name_of(running->call.kind)};
  begun.communicator = handle;
  const std::chrono::milliseconds limit(c.timeout_ms);  // not the context's, which is one to connect in
  if (grouped) {
    group_->calls.push_back({std::move(begun), running, header.peer});
    return;
  }
  if (driver_.device().is_cpu() && c.size > 1 && !adopt_connection(c)) {
    begun.waiting = Waiting::begin([running, limit, connecting = c.connecting, before = c.deferred] {
      connecting->waiting->wait([] { return false; });
      if (before) before->started.wait();
      {
        const TellsAtEnd tells(running->started);  // also if it cannot be started: others wait for their turn
        running->work = start_on(running->call, *connecting->backend);
      }
      if (!running->work->wait(limit)) throw std::runtime_error("it did not complete");
    });
    c.deferred = running;
  } else {
    ask_backend([&] {
      c10d::Backend& backend = connected(c);
      const Waits waits(page_);  // the first message to a peer connects to it
      if (!any) reach(c, message ? std::optional(running->call.peer) : std::nullopt);
      running->work = start_on(running->call, backend);
    });
    if (driver_.device().is_cuda()) c.newest = {running->work};
    begun.work = running->work;
    begun.may_miss_abort = driver_.device().is_cpu() && !message;
    if (driver_.device().is_cpu() && message)
      begun.wait = [running, limit, backend = c.backend] {
        if (!running->work->wait(limit)) throw std::runtime_error("the message did not arrive");
      };
  }
  put_in_flight(c, {std::move(begun), running, header.peer}, state.table());
  publish_started();
  if (any) {
    finish(std::prev(in_flight_.end()), state.table());
    c.peer_sequence[static_cast<uint64_t>(running->work->sourceRank())]++;
    publish_started();
  }
}

// What has been started.
void Communicators::put_in_flight(Communicator& c, Begun begun, BufferTable& table) {
  const auto& running = begun.running;
  const CollectiveKind kind = running->call.kind;
  const bool any = kind == CollectiveKind::kReceiveAny;
  InFlight& f = begun.in_flight;
  if (!is_point_to_point(kind)) {
    c.sequence++;
    f.id = {c.uid_low, c.uid_high, c.sequence};
  } else if (!any) {
    c.peer_sequence[begun.peer]++;
    if (kind == CollectiveKind::kSend) c.sent[begun.peer]++;
    f.id = {uid_of_pair(c.uid_low, begun.peer, c.rank), c.uid_high, c.peer_sequence[begun.peer]};
  }
  for (const uint64_t buffer : f.buffers)
    if (BufferTable::Buffer* b = table.find(buffer)) b->in_flight = true;
  // It keeps the tensors alive until the work is done, also on backends that do not.
  f.finish = [any, running] {
    if (running->call.finish) running->call.finish();
    if (any) running->call.outputs[1].fill_(running->work->sourceRank());  // the second result tells who sent
  };
  in_flight_.push_back(std::move(f));
}

// Whether it is connected, and everything that waited for that has been started: then the rest starts at
// once.
bool Communicators::adopt_connection(Communicator& c) {
  if (c.backend) return true;
  if (!c.connecting) {
    check_reachable();
    begin_connecting(c);
    return false;
  }
  if (!c.connecting->waiting->is_over() || (c.deferred && !c.deferred->started.is_over())) return false;
  if (!c.connecting->backend) return false;  // it failed, which whoever waits for its first work will hear
  std::lock_guard<std::mutex> lock(backends_mutex_);
  c.backend = c.connecting->backend;
  c.connecting.reset();
  c.deferred.reset();
  return true;
}

void Communicators::wait(InFlight& f) {
  if (hang_next_) {
    hang_next_ = false;
    while (!aborted_.load()) usleep(20000);
    throw std::runtime_error("it never ended (a drill)");
  }
  if (f.waiting) {
    if (!f.waiting->wait([this] { return aborted_.load(); }))
      throw std::runtime_error("communication was aborted");
    return;
  }
  if (f.wait) return f.wait();
  while (f.may_miss_abort && !f.work->isCompleted()) {
    try {
      if (f.work->wait(kPatience)) return;  // some kinds never say isCompleted()
    } catch (const std::exception&) {       // its time or ours is out, or it failed: what follows tells
      if (aborted_.load() && !ends(f, deadline_after_abort()))
        throw std::runtime_error("communication was aborted");
    }
  }
  if (!f.work->wait()) throw std::runtime_error("the collective did not complete");
}

// Gloo's messages do not say so: a thread waits for them from where it is first asked, which costs more than
// to wait for them here.
bool Communicators::is_over(InFlight& f) {
  if (f.wait && !f.waiting) f.waiting = Waiting::begin(f.wait);
  return f.waiting ? f.waiting->is_over() : f.work->isCompleted();
}

// `told`: the script's stream is to wait, and where others go on it has told those, too.
void Communicators::finish(std::list<InFlight>::iterator f, BufferTable& table, bool told) {
  try {
    const Waits waits(page_, f->id);
    wait(*f);
  } catch (const LogError&) {  // it never made sense, and was to be started on another thread
    throw;
  } catch (const c10::Error& e) {
    if (driver_.lost(e)) throw;
    throw CollectiveError(f->name + ": " + e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw CollectiveError(f->name + ": " + e.what());
  }
  const InFlight done = std::move(*f);
  in_flight_.erase(f);
  if (driver_.device().is_cuda()) queued_.add(done.name, done.id, done.work);
  for (const uint64_t buffer : done.buffers) {
    const bool still = std::any_of(in_flight_.begin(), in_flight_.end(), [&](const InFlight& other) {
      return std::find(other.buffers.begin(), other.buffers.end(), buffer) != other.buffers.end();
    });
    if (BufferTable::Buffer* b = table.find(buffer)) b->in_flight = still;
  }
  if (!told) driver_.streams().on_each_other([&] { done.work->wait(); });
  done.finish();  // last: it may raise, and nothing is in flight any more
}

void Communicators::wait_for(uint64_t buffer, BufferTable& table) {
  for (;;) {
    const BufferTable::Buffer* b = table.find(buffer);
    if (b == nullptr || !b->in_flight) return;
    const auto f = std::find_if(in_flight_.begin(), in_flight_.end(), [&](const InFlight& one) {
      return std::find(one.buffers.begin(), one.buffers.end(), buffer) != one.buffers.end();
    });
    if (f == in_flight_.end()) throw LogError("a buffer is in flight without a collective");
    finish(f, table);
  }
}

void Communicators::wait_for_barrier(uint64_t communicator, BufferTable& table) {
  const std::string barrier = replay::name_of(CollectiveKind::kBarrier);
  for (auto f = in_flight_.end(); f != in_flight_.begin();)
    if (--f; f->communicator == communicator && f->name == barrier) return finish(f, table);
}

void Communicators::wait_for_queued(const std::function<bool()>& over) {
  try {
    queued_.wait(page_, aborted_, over);
  } catch (const c10::Error& e) {
    if (driver_.lost(e)) throw;
    throw CollectiveError(e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw CollectiveError(e.what());
  }
}

void Communicators::wait_for_all(BufferTable& table) {
  start_group(table);
  while (!in_flight_.empty()) finish(in_flight_.begin(), table);
}

bool Communicators::settled(BufferTable& table) {
  for (auto f = in_flight_.begin(); f != in_flight_.end();) {
    const auto next = std::next(f);
    if (is_over(*f)) finish(f, table);
    f = next;
  }
  return !under_way();
}

std::vector<Communicators::Communicator*> Communicators::in_use() {
  std::vector<Communicator*> all;
  for (auto& [handle, c] : communicators_)
    if (used(c) && c.size > 1) all.push_back(&c);
  std::sort(all.begin(), all.end(), [](const Communicator* a, const Communicator* b) {
    return std::pair(a->uid_high, a->uid_low) < std::pair(b->uid_high, b->uid_low);
  });
  return all;
}

// However many they are, their members are waited for at the same time. (NCCL makes one after the other.)
void Communicators::begin_rebuild(uint32_t generation) {
  const bool same = generation == generation_;
  generation_ = generation;
  aborted_.store(false);
  cut_short_.store(false);
  if (!driver_.device().is_cpu() || !reachable()) return;
  for (Communicator* c : in_use())
    if (!c->backend && !(same && c->connecting)) begin_connecting(*c);
}

uint32_t Communicators::rebuild(uint32_t generation) {
  begin_rebuild(generation);
  const std::vector<Communicator*> all = in_use();
  for (Communicator* c : all) {
    if (!c->connecting) {
      connected(*c);
      // As it was: else two members that go on with messages would wait for the others to use it, too.
      const Waits waits(page_, {});
      if (c->sequence != 0 || c->met_in_group) ask_backend([&] { reach(*c, std::nullopt); });
      continue;
    }
    check_reachable();
    const Waits waits(page_, {});
    c->connecting->waiting->wait([] { return false; });
    const std::lock_guard<std::mutex> lock(backends_mutex_);
    c->backend = std::move(c->connecting->backend);
    c->connecting.reset();
  }
  return static_cast<uint32_t>(all.size());
}

}  // namespace understudy::server
