// One call of a communicator, and how a backend is asked for it.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <optional>
#include <vector>

#include "replay/csrc/log/log_format.h"

namespace understudy::server {

bool is_point_to_point(replay::CollectiveKind kind);

// One collective, ready to start: its tensors and what remains to be done when it has ended.
struct CollectiveCall {
  replay::CollectiveKind kind{};
  c10d::ReduceOp::RedOpType reduce{};
  int64_t peer = 0, tag = 0;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> output_splits, input_splits;
  std::function<void()> finish;
};

// Begins it. Throws replay::LogError for tensors that make no sense, and what the backend throws.
c10::intrusive_ptr<c10d::Work> start_on(CollectiveCall& call, c10d::Backend& backend);

// The smallest call that makes NCCL connect to `peer`, or to all members if there is none; those make it,
// too. It returns when it is connected. It is on a stream that nobody waits for, unless PyTorch has none
// left.
void connect_by_a_call(c10d::Backend& backend, c10::Device device, std::optional<int64_t> peer);

}  // namespace understudy::server
