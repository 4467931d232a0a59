// A call that a communicator's stream has.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "proxy_server/csrc/nccl/communicator.h"

namespace understudy::server::nccl {

class Work final : public c10d::Work {
 public:
  Work(c10d::OpType type, std::shared_ptr<Communicator> communicator, c10::Event end,
       std::vector<at::Tensor> tensors);

  // Also if NCCL says that it failed: then the device may never end it.
  bool isCompleted() override;
  // The host does not wait.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;

 private:
  const std::shared_ptr<Communicator> communicator_;
  const c10::Event end_;
  const std::vector<at::Tensor> tensors_;  // live until it has ended
};

}  // namespace understudy::server::nccl
