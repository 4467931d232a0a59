#include "tests/csrc/simulated_cuda/process_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "tests/csrc/simulated_cuda/host_views.h"
#include "tests/csrc/simulated_cuda/runtime.h"

namespace understudy::simulated {
namespace {

using Tensors = ProcessGroup::Tensors;
using Lists = ProcessGroup::Lists;
using Started = ProcessGroup::Started;
using c10d::OpType;
using c10d::ReduceOp;

constexpr int kGarbage = 0xA5;
constexpr std::chrono::milliseconds kSpins{4}, kPauses{6}, kLook{200};
constexpr int kReceived = 1 << 20;  // added to the tag of a message: its receiver has it

class Work final : public c10d::Work {
 public:
  Work(OpType type, Event end) : c10d::Work(-1, type), end_(end) {}
  bool isCompleted() override { return end_.stream->passed(end_.number); }
  bool wait(std::chrono::milliseconds) override {
    const Event end = end_;
    current_stream().enqueue([end] { end.stream->wait(end.number); });
    return true;
  }
  void synchronize() override { wait({}); }

 private:
  Event end_;
};

Tensors views_of(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.is_cuda(), "NCCL takes tensors of a GPU");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "NCCL takes dense tensors");
    views.push_back(host_view(tensor));
  }
  return views;
}

Lists views_of(const Lists& lists) {
  Lists views;
  for (const Tensors& list : lists) views.push_back(views_of(list));
  return views;
}

Tensors all_of(const Lists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// The carrier knows no average: NCCL's is the sum, divided; of integers towards zero.
ReduceOp as_sum(const ReduceOp& op) { return op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op; }

std::function<void()> divide(const ReduceOp& op, const Tensors& results, int64_t size) {
  if (!(op == ReduceOp::AVG)) return [] {};
  return [results, size] {
    for (at::Tensor result : results) {
      if (at::isIntegralType(result.scalar_type(), true))
        result.div_(size, "trunc");
      else
        result.div_(size);
    }
  };
}

// As NCCL's thread for what goes between hosts: it looks without a pause whether something has come. Here it
// does so two fifths of the time, which is work enough to whoever looks from outside.
void spin_until(const std::atomic<bool>& over) {
  using std::chrono::steady_clock;
  while (!over) {
    for (const auto until = steady_clock::now() + kSpins; !over && steady_clock::now() < until;) {
    }
    std::this_thread::sleep_for(kPauses);
  }
}

}  // namespace

ProcessGroup::ProcessGroup(int rank, int size, std::function<Carrier()> connect)
    : c10d::Backend(rank, size),
      shared_(std::make_shared<Shared>(std::move(connect))),
      stream_(stream(current_device(), own_stream_id())) {}

// As that of ProcessGroupNCCL: what is queued is aborted.
ProcessGroup::~ProcessGroup() { ProcessGroup::abort(); }

void ProcessGroup::connect() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  // That of PyTorch keeps the communicators that it has aborted, and each call of them is an error.
  TORCH_CHECK_WITH(DistBackendError, !shared_->carrier || !shared_->aborted,
                   "NCCL communicator was aborted on rank ", getRank());
  if (!shared_->carrier) shared_->carrier = shared_->connect();
}

// Finds nothing to abort while it connects, as that of ProcessGroupNCCL.
void ProcessGroup::abort() {
  shared_->aborted = true;
  const std::unique_lock<std::mutex> lock(shared_->mutex, std::try_to_lock);
  if (lock && shared_->carrier) shared_->carrier->abort();
}

void ProcessGroup::shutdown() { abort(); }

// False if it was aborted. A call of Gloo's that begins just then may miss that, and wait for ever: it is
// left behind, with what would wait for it.
bool ProcessGroup::Shared::ends(const Started& work) const {
  const OpType type = work->retrieveOpType();
  if (type == OpType::SEND || type == OpType::RECV) return work->wait();  // it takes no second wait
  for (;;) {
    try {
      return work->wait(kLook);
    } catch (const std::exception&) {  // not yet, or it failed
      if (work->isCompleted()) throw;
      if (!aborted) continue;
      static auto* const left_behind = new std::vector<std::pair<Started, Carrier>>;
      static std::mutex left_behind_mutex;
      const std::lock_guard<std::mutex> lock(left_behind_mutex);
      left_behind->emplace_back(work, carrier);
      return false;
    }
  }
}

// False if it was aborted.
bool ProcessGroup::Shared::run(const Item& item) {
  try {
    if (aborted) return false;
    if (const Started work = item.start(*carrier); work && !ends(work)) return false;
    if (aborted) return false;
    item.finish();
    return true;
  } catch (const std::exception&) {
    spin_until(aborted);  // a kernel of NCCL goes on waiting for its peer
    return false;
  }
}

Started ProcessGroup::enqueue(OpType type, Item item) {
  connect();
  Stream& before = current_stream();
  const uint64_t number = before.newest();
  const uint64_t end = stream_.enqueue([shared = shared_, item = std::move(item), &before, number] {
    before.wait(number);
    if (shared->run(item)) return;
    for (const at::Tensor& result : item.results)
      if (result.nbytes() != 0) std::memset(result.mutable_data_ptr(), kGarbage, result.nbytes());
  });
  return c10::make_intrusive<Work>(type, Event{&stream_, end});
}

Started ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Tensors views = views_of(tensors);
  return enqueue(
      OpType::BROADCAST,
      {[views, options](c10d::Backend& on) mutable { return on.broadcast(views, options); }, [] {}, views});
}

Started ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Tensors views = views_of(tensors);
  c10d::AllreduceOptions summed = options;
  summed.reduceOp = as_sum(options.reduceOp);
  return enqueue(OpType::ALLREDUCE,
                 {[views, summed](c10d::Backend& on) mutable { return on.allreduce(views, summed); },
                  divide(options.reduceOp, views, getSize()), views});
}

Started ProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Tensors views = views_of(tensors);
  c10d::AllreduceCoalescedOptions summed = options;
  summed.reduceOp = as_sum(options.reduceOp);
  return enqueue(OpType::ALLREDUCE_COALESCED, {[views, summed](c10d::Backend& on) mutable {
                                                 return on.allreduce_coalesced(views, summed);
                                               },
                                               divide(options.reduceOp, views, getSize()), views});
}

Started ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Tensors views = views_of(tensors);
  const bool here = options.rootRank == getRank();
  c10d::ReduceOptions summed = options;
  summed.reduceOp = as_sum(options.reduceOp);
  return enqueue(OpType::REDUCE,
                 {[views, summed](c10d::Backend& on) mutable { return on.reduce(views, summed); },
                  here ? divide(options.reduceOp, views, getSize()) : [] {}, views});
}

Started ProcessGroup::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Lists out = views_of(outputs);
  return enqueue(OpType::ALLGATHER, {[out, in = views_of(inputs), options](c10d::Backend& on) mutable {
                                       return on.allgather(out, in, options);
                                     },
                                     [] {}, all_of(out)});
}

Started ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) {
  Tensors views = views_of({output, input});
  return enqueue(OpType::_ALLGATHER_BASE, {[views, options](c10d::Backend& on) mutable {
                                             return on._allgather_base(views[0], views[1], options);
                                           },
                                           [] {},
                                           {views[0]}});
}

Started ProcessGroup::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Lists out = views_of(outputs);
  return enqueue(OpType::GATHER, {[out, in = views_of(inputs), options](c10d::Backend& on) mutable {
                                    return on.gather(out, in, options);
                                  },
                                  [] {}, all_of(out)});
}

Started ProcessGroup::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  Tensors out = views_of(outputs);
  return enqueue(OpType::SCATTER, {[out, in = views_of(inputs), options](c10d::Backend& on) mutable {
                                     return on.scatter(out, in, options);
                                   },
                                   [] {}, out});
}

Started ProcessGroup::reduce_scatter(Tensors& outputs, Lists& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  Tensors out = views_of(outputs);
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = as_sum(options.reduceOp);
  return enqueue(OpType::REDUCE_SCATTER, {[out, in = views_of(inputs), summed](c10d::Backend& on) mutable {
                                            return on.reduce_scatter(out, in, summed);
                                          },
                                          divide(options.reduceOp, out, getSize()), out});
}

Started ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  Tensors views = views_of({output, input});
  c10d::ReduceScatterOptions summed = options;
  summed.reduceOp = as_sum(options.reduceOp);
  return enqueue(OpType::_REDUCE_SCATTER_BASE, {[views, summed](c10d::Backend& on) mutable {
                                                  return on._reduce_scatter_base(views[0], views[1], summed);
                                                },
                                                divide(options.reduceOp, {views[0]}, getSize()),
                                                {views[0]}});
}

Started ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions& options) {
  Tensors views = views_of({output, input});
  return enqueue(OpType::ALLTOALL_BASE,
                 {[views, to = output_splits, from = input_splits, options](c10d::Backend& on) mutable {
                    return on.alltoall_base(views[0], views[1], to, from, options);
                  },
                  [] {},
                  {views[0]}});
}

// The carrier has only the other form of it.
Started ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Tensors out = views_of(outputs);
  const auto together = std::make_shared<Tensors>();
  const auto start = [out, in = views_of(inputs), options, together](c10d::Backend& on) {
    Tensors flat;
    std::vector<int64_t> to, from;
    int64_t total = 0;
    for (const at::Tensor& one : in) flat.push_back(one.reshape({-1})), from.push_back(one.numel());
    for (const at::Tensor& one : out) to.push_back(one.numel()), total += one.numel();
    *together = {at::empty({total}, out.at(0).options()), at::cat(flat)};
    return on.alltoall_base((*together)[0], (*together)[1], to, from, options);
  };
  const auto spread = [out, together] {
    int64_t offset = 0;
    for (at::Tensor one : out) {
      one.copy_((*together)[0].narrow(0, offset, one.numel()).view(one.sizes()));
      offset += one.numel();
    }
  };
  return enqueue(OpType::ALLTOALL, {start, spread, out});
}

// Gloo would take a message before its receiver wants it; NCCL does so with small ones only, and nothing may
// depend on that.
Started ProcessGroup::send(Tensors& tensors, int to, int tag) {
  Tensors views = views_of(tensors);
  return enqueue_or_collect(OpType::SEND,
                            {[views, to, tag](c10d::Backend& on) mutable { return on.send(views, to, tag); },
                             [byte = Tensors{at::empty({1}, at::kByte)}, to, tag](c10d::Backend& on) mutable {
                               return on.recv(byte, to, tag + kReceived);
                             }});
}

Started ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  Tensors views = views_of(tensors);
  return enqueue_or_collect(
      OpType::RECV, {[views, from, tag](c10d::Backend& on) mutable { return on.recv(views, from, tag); },
                     [byte = Tensors{at::zeros({1}, at::kByte)}, from, tag](c10d::Backend& on) mutable {
                       return on.send(byte, from, tag + kReceived);
                     },
                     views});
}

Started ProcessGroup::enqueue_or_collect(OpType type, Message message) {
  if (!group_) return enqueue_together(type, {std::move(message)});
  group_->push_back(std::move(message));
  return {};
}

Started ProcessGroup::enqueue_together(OpType type, std::vector<Message> messages) {
  Tensors results;
  for (const Message& one : messages) results.insert(results.end(), one.results.begin(), one.results.end());
  const auto run = [messages = std::move(messages)](c10d::Backend& on) -> Started {
    for (const auto half : {&Message::start, &Message::receipt}) {
      std::vector<Started> begun;
      for (const Message& one : messages) begun.push_back((one.*half)(on));
      for (const Started& one : begun) one->wait();
    }
    return {};
  };
  return enqueue(type, {run, [] {}, results});
}

void ProcessGroup::startCoalescing() { group_.emplace(); }

Started ProcessGroup::endCoalescing() {
  TORCH_CHECK(group_, "NCCL has no open group");
  return enqueue_together(OpType::COALESCED, *std::exchange(group_, std::nullopt));
}

Started ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return enqueue(OpType::BARRIER, {[options](c10d::Backend& on) { return on.barrier(options); }});
}

}  // namespace understudy::simulated
