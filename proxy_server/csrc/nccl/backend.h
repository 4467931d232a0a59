// A process group whose collectives are calls of NCCL's, made here (proxyd's `--collectives own`), in the
// place of PyTorch's ProcessGroupNCCL. To whoever calls it there is no difference but these: nobody waits
// longer than until abort(), which itself returns at once, and it has no threads that watch it.
//
// As there, messages between two ranks have a communicator of their own, so that they do not stand behind
// collectives; those of a group of calls go over the one of all members, as do collectives. Each is connected
// when it is first used.
//
// Each communicator has a stream. It waits for what is current when a call is made; Work::wait() makes what
// is current then wait for the call's end.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "proxy_server/csrc/nccl/communicator.h"

namespace understudy::server::nccl {

class Backend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Started = c10::intrusive_ptr<c10d::Work>;

  // Throws LibraryError. `store`: where members tell each other NCCL's ids. `limit`: for connecting to them.
  Backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds limit);
  ~Backend() override;

  const std::string getBackendName() const override { return "nccl"; }
  void abort() override;
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
  Started recvAnysource(Tensors& tensors, int tag) override;
  Started barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Call {
    Tensors tensors;  // which live until it has ended; their memory is what NCCL reads and writes
    Communicator::Calls calls;
    std::function<void()> before = {}, after = {};  // in its stream: copies from and to what it works on
  };
  Started start(c10d::OpType type, Call call);
  Started start_on(Communicator& communicator, c10d::OpType type, std::vector<Call> calls);
  Communicator& of_all(c10::Device device);
  Communicator& of_pair(int peer, c10::Device device);
  Communicator& connected(const std::string& name, int rank, int size, c10::Device device);
  UniqueId shared_id(const std::string& name, bool tells);
  Started reduce_all(c10d::OpType type, const Tensors& tensors, const c10d::ReduceOp& op);
  Started message(c10d::OpType type, const Tensors& tensors, int peer);
  void check_alive() const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds limit_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // abort() comes from another thread
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  std::optional<std::vector<Call>> group_;  // since startCoalescing()
};

}  // namespace understudy::server::nccl
