#include "proxy_server/csrc/collectives.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstdio>

#include "proxy_server/csrc/call_template.h"
#include "proxy_server/csrc/device_state.h"
#include "replay/csrc/futex.h"
#include "replay/csrc/names.h"

namespace understudy::server {
namespace {

using replay::CollectiveHeader;
using replay::CollectiveKind;
using replay::LogError;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

constexpr uint64_t kGivenUp = ~0ull;  // in a commit's mark: the communicator is gone since the commit before
constexpr uint64_t kPeerRow = ~0ull;  // in a manifest row's `size`: counts messages with the peer in `rank`,
                                      // and in `timeout_ms` those of them that were sent to it

constexpr std::chrono::milliseconds kPatience{200};  // with a wait that nobody may end

std::string hexadecimal(uint64_t high, uint64_t low) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return text;
}

// Messages between two ranks count as a communicator of these two.
uint64_t uid_of_pair(uint64_t uid_low, uint64_t one, uint64_t other) {
  const uint64_t pair = std::min(one, other) * 65536 + std::max(one, other) + 1;
  return uid_low ^ (pair * 0x9E3779B97F4A7C15ull);
}

uint64_t uid_of_messages(uint64_t uid_low, uint64_t from, uint64_t to) {
  return uid_low ^ ((from * 65536 + to + 1) * 0x9E3779B97F4A7C15ull);
}

bool is_point_to_point(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive ||
         kind == CollectiveKind::kReceiveAny;
}

// One collective, ready to start: its tensors and what remains to be done when it has ended.
struct Call {
  CollectiveKind kind{};
  c10d::ReduceOp::RedOpType reduce{};
  int64_t peer = 0, tag = 0;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> output_splits, input_splits;
  std::function<void()> finish;
};

std::vector<std::vector<at::Tensor>> in_groups(const std::vector<at::Tensor>& flat, size_t group) {
  std::vector<std::vector<at::Tensor>> groups;
  if (group == 0 || flat.size() % group != 0) throw LogError("a collective has the wrong number of tensors");
  for (size_t i = 0; i < flat.size(); i += group)
    groups.emplace_back(flat.begin() + static_cast<long>(i), flat.begin() + static_cast<long>(i + group));
  return groups;
}

void need(bool condition) {
  if (!condition) throw LogError("a collective has the wrong number of tensors");
}

// AVG where the backend knows SUM only.
c10d::ReduceOp::RedOpType average_as_sum(Call& call, const c10d::Backend& backend,
                                         const std::vector<at::Tensor>& results) {
  if (call.reduce != c10d::ReduceOp::AVG || backend.getBackendName() == "nccl") return call.reduce;
  call.finish = [size = backend.getSize(), results] {
    for (at::Tensor t : results) {
      if (at::isIntegralType(t.scalar_type(), true))
        t.div_(size, "trunc");  // as NCCL averages integers
      else
        t.div_(size);
    }
  };
  return c10d::ReduceOp::SUM;
}

// One piece of memory, whatever its shape: so NCCL takes it, while Gloo would split it along its first
// dimension.
at::Tensor flat(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

WorkPointer all_to_all_by_base(Call& call, c10d::Backend& backend) {
  need(static_cast<int>(call.inputs.size()) == backend.getSize() &&
       call.outputs.size() == call.inputs.size());
  std::vector<int64_t> in_splits, out_splits;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& t : call.inputs) flat.push_back(t.reshape({-1})), in_splits.push_back(t.numel());
  int64_t total = 0;
  for (const at::Tensor& t : call.outputs) out_splits.push_back(t.numel()), total += t.numel();
  at::Tensor in = at::cat(flat), out = at::empty({total}, call.outputs[0].options());
  call.finish = [out, out_splits, outputs = call.outputs] {
    int64_t at = 0;
    for (size_t i = 0; i < outputs.size(); i++) {
      at::Tensor to = outputs[i];
      to.copy_(out.narrow(0, at, out_splits[i]).view(to.sizes()));
      at += out_splits[i];
    }
  };
  return backend.alltoall_base(out, in, out_splits, in_splits, {});
}

WorkPointer start_on(Call& call, c10d::Backend& backend) {
  auto& in = call.inputs;
  auto& out = call.outputs;
  const auto size = static_cast<size_t>(backend.getSize());
  switch (call.kind) {
    case CollectiveKind::kBroadcast: {
      c10d::BroadcastOptions o;
      o.rootRank = call.peer;
      return backend.broadcast(out, o);
    }
    case CollectiveKind::kAllReduce: {
      if (out.size() > 1) {
        c10d::AllreduceCoalescedOptions o;
        o.reduceOp = average_as_sum(call, backend, out);
        return backend.allreduce_coalesced(out, o);
      }
      c10d::AllreduceOptions o;
      o.reduceOp = average_as_sum(call, backend, out);
      return backend.allreduce(out, o);
    }
    case CollectiveKind::kReduce: {
      c10d::ReduceOptions o;
      o.rootRank = call.peer;
      o.reduceOp = call.peer == backend.getRank() ? average_as_sum(call, backend, out)
                   : call.reduce == c10d::ReduceOp::AVG && backend.getBackendName() != "nccl"
                       ? c10d::ReduceOp::SUM
                       : call.reduce;
      return backend.reduce(out, o);
    }
    case CollectiveKind::kAllGather: {
      auto groups = in_groups(out, size);
      need(groups.size() == in.size());
      return backend.allgather(groups, in);
    }
    case CollectiveKind::kAllGatherBase:
      need(in.size() == 1 && out.size() == 1);
      in[0] = flat(in[0]), out[0] = flat(out[0]);
      return backend._allgather_base(out[0], in[0]);
    case CollectiveKind::kGather: {
      c10d::GatherOptions o;
      o.rootRank = call.peer;
      std::vector<std::vector<at::Tensor>> groups;
      if (!out.empty()) groups = in_groups(out, size);
      return backend.gather(groups, in, o);
    }
    case CollectiveKind::kScatter: {
      c10d::ScatterOptions o;
      o.rootRank = call.peer;
      std::vector<std::vector<at::Tensor>> groups;
      if (!in.empty()) groups = in_groups(in, size);
      return backend.scatter(out, groups, o);
    }
    case CollectiveKind::kReduceScatter: {
      auto groups = in_groups(in, size);
      need(groups.size() == out.size());
      c10d::ReduceScatterOptions o;
      o.reduceOp = average_as_sum(call, backend, out);
      return backend.reduce_scatter(out, groups, o);
    }
    case CollectiveKind::kReduceScatterBase: {
      need(in.size() == 1 && out.size() == 1);
      in[0] = flat(in[0]), out[0] = flat(out[0]);
      c10d::ReduceScatterOptions o;
      o.reduceOp = average_as_sum(call, backend, out);
      return backend._reduce_scatter_base(out[0], in[0], o);
    }
    case CollectiveKind::kAllToAllBase:
      need(in.size() == 1 && out.size() == 1);
      return backend.alltoall_base(out[0], in[0], call.output_splits, call.input_splits);
    case CollectiveKind::kAllToAll:
      if (backend.getBackendName() == "nccl") return backend.alltoall(out, in);
      return all_to_all_by_base(call, backend);
    case CollectiveKind::kBarrier:
      return backend.barrier();
    case CollectiveKind::kSend:
      return backend.send(in, static_cast<int>(call.peer), static_cast<int>(call.tag));
    case CollectiveKind::kReceive:
      return backend.recv(out, static_cast<int>(call.peer), static_cast<int>(call.tag));
    case CollectiveKind::kReceiveAny: {
      need(out.size() == 2 && out[1].numel() == 1 && out[1].scalar_type() == at::kLong);
      std::vector<at::Tensor> received{out[0]};
      return backend.recvAnysource(received, static_cast<int>(call.tag));
    }
  }
  throw LogError("unknown collective");
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

void check_rank(uint64_t rank, uint64_t size) {
  if (size == 0 || size > 65536 || rank >= size)
    throw LogError("a communicator has an impossible rank or size");
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
  if (!communicators_.emplace(handle, std::move(c)).second) throw LogError("a communicator is created twice");
}

void Communicators::destroy(uint64_t handle, BufferTable& table) {
  wait_for_all(table);
  const auto known = communicators_.find(handle);
  if (known == communicators_.end()) throw LogError("unknown communicator " + std::to_string(handle));
  for (replay::CommunicatorMark mark : marks_of(known->second)) {
    mark.sequence = kGivenUp;
    given_up_.push_back(mark);
  }
  std::lock_guard<std::mutex> lock(backends_mutex_);
  communicators_.erase(known);
}

c10d::Backend& Communicators::connected(Communicator& c) {
  if (!c.backend) {
    if (aborted_.load()) throw CollectiveError("communication was aborted");
    if (replay::now_ns() < page_.partitioned_until_ns.load())
      throw CollectiveError("cannot connect to the peers: no route to them (a drill)");
    page_.wait_uid_low.store(0, std::memory_order_relaxed);
    page_.in_collective.store(1);
    c10::intrusive_ptr<c10d::Backend> backend;
    try {
      backend = factory_({hexadecimal(c.uid_high, c.uid_low), generation_, static_cast<int64_t>(c.rank),
                          static_cast<int64_t>(c.size), static_cast<int64_t>(c.timeout_ms)});
    } catch (const std::exception& e) {
      page_.in_collective.store(0);
      throw CollectiveError(std::string("cannot connect to the peers: ") + e.what());
    }
    page_.in_collective.store(0);
    std::lock_guard<std::mutex> lock(backends_mutex_);
    c.backend = std::move(backend);
  }
  return *c.backend;
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
  Call call;
  call.kind = static_cast<CollectiveKind>(header.kind);
  call.reduce = static_cast<c10d::ReduceOp::RedOpType>(header.reduce_op);
  const bool any = call.kind == CollectiveKind::kReceiveAny;
  if (!any && header.peer >= c.size) throw LogError("a collective names a rank outside its communicator");
  call.peer = static_cast<int64_t>(header.peer);
  call.tag = static_cast<int64_t>(header.tag);

  c10d::Backend& backend = connected(c);
  std::vector<uint64_t> buffers;
  const auto tensors = [&](uint64_t n, bool written, std::vector<at::Tensor>& into) {
    body.count(n, 3);
    for (uint64_t i = 0; i < n; i++) {
      const uint64_t word = body.next();
      const uint64_t buffer = body.next();
      const TensorSpec spec = parse_tensor(word, body);
      const c10::Storage& storage = written ? state.write(buffer) : state.read(buffer);
      into.push_back(view_of(storage, spec, driver_));
      check_dense_extent(storage, into.back());
      buffers.push_back(buffer);
    }
  };
  tensors(header.inputs, false, call.inputs);
  tensors(header.outputs, true, call.outputs);
  body.count(header.splits);
  for (uint64_t i = 0; i < header.splits; i++)
    (i < header.splits / 2 ? call.output_splits : call.input_splits).push_back(checked_split(body.next()));

  WorkPointer work;
  try {
    work = start_on(call, backend);
  } catch (const LogError&) {
    throw;
  } catch (const c10::Error& e) {
    throw CollectiveError(e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw CollectiveError(e.what());
  }
  if (!is_point_to_point(call.kind)) {
    c.sequence++;
  } else if (!any) {
    c.peer_sequence[header.peer]++;
    if (call.kind == CollectiveKind::kSend) c.sent[header.peer]++;
  }
  for (const uint64_t buffer : buffers)
    if (BufferTable::Buffer* b = state.table().find(buffer)) b->in_flight = true;
  // The work keeps the tensors alive until it is done, also on backends that do not.
  auto keep = [any, work, finish = std::move(call.finish), in = std::move(call.inputs),
               out = std::move(call.outputs)] {
    if (finish) finish();
    if (any) at::Tensor(out[1]).fill_(work->sourceRank());  // the second result tells who sent
  };
  InFlight begun{work, std::move(buffers), std::move(keep), replay::name_of(call.kind)};
  begun.may_miss_abort = driver_.device().is_cpu() && !is_point_to_point(call.kind);
  if (!is_point_to_point(call.kind)) {
    begun.uid_low = c.uid_low, begun.uid_high = c.uid_high, begun.sequence = c.sequence;
  } else if (!any) {
    begun.uid_low = uid_of_pair(c.uid_low, header.peer, c.rank), begun.uid_high = c.uid_high;
    begun.sequence = c.peer_sequence[header.peer];
  }
  in_flight_.push_back(std::move(begun));
  publish_started();
  if (any) {
    wait_for_all(state.table());
    c.peer_sequence[static_cast<uint64_t>(work->sourceRank())]++;
    publish_started();
  }
}

// So that proxyd can tell a rank that waits for a peer's program from one that waits in vain.
void Communicators::publish_started() {
  uint32_t n = 0;
  const auto put = [&](uint64_t low, uint64_t high, uint64_t sequence, uint64_t size) {
    if (n == replay::kMaxCommunicators) return;
    replay::StartedMark& mark = page_.started[n++];
    mark.uid_low.store(low, std::memory_order_relaxed);
    mark.uid_high.store(high, std::memory_order_relaxed);
    mark.sequence.store(sequence, std::memory_order_relaxed);
    mark.size.store(size, std::memory_order_relaxed);
  };
  for (const auto& [handle, c] : communicators_) {
    put(c.uid_low, c.uid_high, c.sequence, c.size);
    for (const auto& [peer, sequence] : c.peer_sequence)
      put(uid_of_pair(c.uid_low, peer, c.rank), c.uid_high, sequence, 2);
  }
  page_.started_count.store(n, std::memory_order_release);
}

void Communicators::wait(InFlight& f) {
  if (hang_next_) {
    hang_next_ = false;
    while (!aborted_.load()) usleep(20000);
    throw std::runtime_error("it never ended (a drill)");
  }
  while (f.may_miss_abort && !f.work->isCompleted()) {
    try {
      if (f.work->wait(kPatience)) return;  // some kinds never say isCompleted()
    } catch (const std::exception&) {       // its time or ours is out, or it failed: what follows tells
      if (aborted_.load() && !ends(f)) throw std::runtime_error("communication was aborted");
    }
  }
  if (!f.work->wait()) throw std::runtime_error("the collective did not complete");
}

void Communicators::finish_oldest(BufferTable& table) {
  InFlight& f = in_flight_.front();
  page_.wait_uid_low.store(f.uid_low, std::memory_order_relaxed);
  page_.wait_uid_high.store(f.uid_high, std::memory_order_relaxed);
  page_.wait_sequence.store(f.sequence, std::memory_order_relaxed);
  page_.in_collective.store(1);
  try {
    wait(f);
  } catch (const c10::Error& e) {
    page_.in_collective.store(0);
    throw CollectiveError(f.name + ": " + e.what_without_backtrace());
  } catch (const std::exception& e) {
    page_.in_collective.store(0);
    throw CollectiveError(f.name + ": " + e.what());
  }
  page_.in_collective.store(0);
  const InFlight done = std::move(f);
  in_flight_.pop_front();
  for (const uint64_t buffer : done.buffers) {
    const bool still = std::any_of(in_flight_.begin(), in_flight_.end(), [&](const InFlight& other) {
      return std::find(other.buffers.begin(), other.buffers.end(), buffer) != other.buffers.end();
    });
    if (BufferTable::Buffer* b = table.find(buffer)) b->in_flight = still;
  }
  done.finish();  // last: it may raise, and nothing is in flight any more
}

void Communicators::wait_for(uint64_t buffer, BufferTable& table) {
  for (;;) {
    const BufferTable::Buffer* b = table.find(buffer);
    if (b == nullptr || !b->in_flight) return;
    if (in_flight_.empty()) throw LogError("a buffer is in flight without a collective");
    finish_oldest(table);
  }
}

void Communicators::wait_for_all(BufferTable& table) {
  while (!in_flight_.empty()) finish_oldest(table);
}

std::vector<replay::CommunicatorMark> Communicators::marks_of(const Communicator& c) {
  std::vector<replay::CommunicatorMark> marks;
  // Its members connect all together, at their first use or at a rebuild: the first use counts, too, so that
  // no cut has some of them before it and others behind.
  if (c.size > 1) marks.push_back({c.uid_low, c.uid_high, c.sequence + (used(c) ? 1 : 0), c.size});
  // Messages from one rank to another count as a communicator of these two, for each direction: a send may
  // end before its message is received, so two that cross each other must not make up for one another.
  for (const auto& [peer, sequence] : c.peer_sequence) {
    const auto sends = c.sent.find(peer);
    const uint64_t sent = sends == c.sent.end() ? 0 : sends->second;
    marks.push_back({uid_of_messages(c.uid_low, c.rank, peer), c.uid_high, sent, 2});
    marks.push_back({uid_of_messages(c.uid_low, peer, c.rank), c.uid_high, sequence - sent, 2});
  }
  return marks;
}

void Communicators::marks(replay::CommitEntry& entry) {
  uint32_t n = 0;
  const auto put = [&](const replay::CommunicatorMark& mark) {
    if (n < replay::kMaxCommunicators) entry.communicator[n] = mark;
    n++;
  };
  for (const auto& [handle, c] : communicators_)
    for (const auto& mark : marks_of(c)) put(mark);
  // One that was made, used and given up since the commit before: nobody would know that its members stand
  // on different sides of it.
  for (const auto& mark : given_up_) put(mark);
  given_up_.clear();
  entry.communicators = n;
}

std::vector<replay::ManifestCommunicator> Communicators::manifest() const {
  std::vector<replay::ManifestCommunicator> rows;
  for (const auto& [handle, c] : communicators_) {
    rows.push_back({handle, c.uid_low, c.uid_high, c.rank, c.size, c.sequence, c.timeout_ms});
    for (const auto& [peer, sequence] : c.peer_sequence)
      rows.push_back({handle, c.uid_low, c.uid_high, peer, kPeerRow, sequence,
                      c.sent.count(peer) != 0 ? c.sent.at(peer) : 0});
  }
  return rows;
}

void Communicators::restore(const std::vector<replay::ManifestCommunicator>& rows) {
  std::map<uint64_t, Communicator> restored;
  for (const auto& row : rows) {
    Communicator& c = restored[row.communicator];
    if (row.size == kPeerRow) {
      c.peer_sequence[row.rank] = row.sequence;
      c.sent[row.rank] = row.timeout_ms;
      continue;
    }
    check_rank(row.rank, row.size);
    c.uid_low = row.uid_low;
    c.uid_high = row.uid_high;
    c.rank = row.rank;
    c.size = row.size;
    c.sequence = row.sequence;
    c.timeout_ms = row.timeout_ms;
  }
  given_up_.clear();
  std::lock_guard<std::mutex> lock(backends_mutex_);
  communicators_ = std::move(restored);
  publish_started();
}

uint32_t Communicators::rebuild(uint32_t generation) {
  generation_ = generation;
  aborted_.store(false);
  std::vector<Communicator*> in_use;
  for (auto& [handle, c] : communicators_)
    if (used(c) && c.size > 1) in_use.push_back(&c);
  std::sort(in_use.begin(), in_use.end(), [](const Communicator* a, const Communicator* b) {
    return std::pair(a->uid_high, a->uid_low) < std::pair(b->uid_high, b->uid_low);
  });
  for (Communicator* c : in_use) connected(*c);
  return static_cast<uint32_t>(in_use.size());
}

}  // namespace understudy::server
