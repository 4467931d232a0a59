// A process group that behaves as ProcessGroupNCCL does, over one that moves the bytes (Gloo).
//
// It connects to its peers at the first call, in the thread that calls; nothing interrupts that.
//
// Calls return at once; a collective runs on a stream of its own, behind what was enqueued before it, and
// wait() makes the current stream wait. One whose peer is gone never ends by itself; abort() lets it end, and
// leaves garbage in what it was to fill. Sends wait for their receiver; those of a group start together.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tests/csrc/simulated_cuda/stream.h"

namespace understudy::simulated {

class ProcessGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Started = c10::intrusive_ptr<c10d::Work>;

  using Carrier = c10::intrusive_ptr<c10d::Backend>;

  // `connect`: makes the carrier, with all peers.
  ProcessGroup(int rank, int size, std::function<Carrier()> connect);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "nccl"; }
  void abort() override;
  void shutdown() override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  Started endCoalescing() override;

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Started allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Started _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  Started gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Started scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Started reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Started _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Started alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Started alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Started send(Tensors& tensors, int to, int tag) override;
  Started recv(Tensors& tensors, int from, int tag) override;
  Started barrier(const c10d::BarrierOptions& options) override;

 private:
  // What the stream's thread does: begins on the carrier, and what is left when that has ended.
  struct Item {
    std::function<Started(c10d::Backend&)> start;
    std::function<void()> finish = [] {};
    Tensors results = {};  // as kernels see them; garbage after an abort
  };
  Started enqueue(c10d::OpType type, Item item);

  // A message's two halves: the second one, its receipt, goes the other way.
  struct Message {
    std::function<Started(c10d::Backend&)> start, receipt;
    Tensors results = {};
  };
  Started enqueue_together(c10d::OpType type, std::vector<Message> messages);
  Started enqueue_or_collect(c10d::OpType type, Message message);

  // Outlives the group: collectives may still be in the stream.
  struct Shared {
    const std::function<Carrier()> connect;
    std::mutex mutex = {};
    Carrier carrier = {};  // once it is connected
    std::atomic<bool> aborted{false};
    bool run(const Item& item);
    bool ends(const Started& work) const;
  };
  void connect();
  std::shared_ptr<Shared> shared_;
  Stream& stream_;
  std::optional<std::vector<Message>> group_;  // since startCoalescing()
};

}  // namespace understudy::simulated
