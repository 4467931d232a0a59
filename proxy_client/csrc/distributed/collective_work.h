// What a collective returns. Where a script has one stream there is nothing to wait for, because the log
// orders everything behind it; where it has several, the current one waits.
#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <optional>

namespace understudy::client {

class CollectiveWork final : public c10d::Work {
 public:
  struct Details {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    c10::DeviceIndex device = 0;
    uint64_t sequence = 0;
    int source = -1;                         // of a receive
    std::optional<at::Tensor> any_source{};  // where the server writes it if it is not known
    uint64_t barrier_of = 0;                 // a communicator: wait() is for the host
    uint64_t mark = 0;                       // of its end, for streams that wait
  };
  CollectiveWork(int rank, Details details, std::vector<at::Tensor> outputs);

  // Whatever the script does next comes behind it, so it is never told to wait; an event tells when it is
  // over.
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  // Raises an asynchronous error that is already known.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override;
  void abort() override {}
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return details_.sequence; }
  float getDuration() const override { return 0; }

 private:
  const Details details_;
  const std::vector<at::Tensor> outputs_;
};

}  // namespace understudy::client
