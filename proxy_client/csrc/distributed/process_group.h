// The c10d backend that answers to "nccl": each collective is one record; the communicators live in the
// servers.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <mutex>
#include <optional>
#include <vector>

#include "proxy_client/csrc/session.h"

namespace understudy::client {

// `ProcessGroupNCCL.Options`: scripts set these; only the timeout means something to us.
struct ProcessGroupOptions final : c10d::Backend::Options {
  ProcessGroupOptions() : Options("nccl", std::chrono::minutes(10)) {}  // NCCL's default
  bool is_high_priority_stream = false;
  int64_t split_color = 0;
};

class ProcessGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using OptionsPtr = c10::intrusive_ptr<ProcessGroupOptions>;

  // Agrees on the communicator's identity through the store. The communicator itself is made by the first
  // collective, when the device is known.
  ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, OptionsPtr options);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  const OptionsPtr& options() const { return options_; }
  // A communicator of its own for some of the ranks: NCCL would split its own, ours costs no more when new.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void eagerConnectSingleDevice(at::Device device) override;
  // Forgets the communicator. Collectives after it are an error.
  void shutdown() override;
  void abort() override { shutdown(); }
  // Messages between these two start together, as `batch_isend_irecv` has it: one by one, two ranks that both
  // send first would wait for each other on a GPU. They are appended at the end: the log never holds a
  // part of a group. One that does not come to its end, as something raised in between, is forgotten, as
  // NCCL would never have started it. Not on the cpu driver, whose Gloo needs none of it.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  // The sum of sparse tensors of any numbers of elements. Waits for the device: how many there are is only
  // known there.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Request;
  struct Group {
    std::vector<std::vector<uint64_t>> bodies;  // of records
    Tensors tensors;                            // theirs, which must not be freed before
  };
  WorkPtr submit(const Request& request);
  WorkPtr nothing_to_do(uint64_t mark = 0) const;
  c10::DeviceIndex device_of(const Request& request) const;
  void ensure_communicator(LogWriter& log);

  std::mutex
      mutex_;  // of everything below; held while appending, so that sequence numbers follow the log's order
  const OptionsPtr options_;
  uint64_t uid_low_ = 0, uid_high_ = 0;
  uint64_t communicator_ = 0;  // 0: not created yet
  uint64_t sequence_ = 0;
  uint64_t of_all_ = 0;  // collectives, without messages
  bool over_ = false;
  std::optional<Group> group_;  // messages since startCoalescing()
};

}  // namespace understudy::client
