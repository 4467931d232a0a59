#include "proxy_server/csrc/collectives/collective_calls.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "replay/csrc/log/log_map.h"

namespace understudy::server {

using replay::CollectiveKind;
using replay::LogError;

namespace {

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
c10d::ReduceOp::RedOpType average_as_sum(CollectiveCall& call, const c10d::Backend& backend,
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

c10::intrusive_ptr<c10d::Work> all_to_all_by_base(CollectiveCall& call, c10d::Backend& backend) {
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

}  // namespace

bool is_point_to_point(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive ||
         kind == CollectiveKind::kReceiveAny;
}

c10::intrusive_ptr<c10d::Work> start_on(CollectiveCall& call, c10d::Backend& backend) {
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
    case CollectiveKind::kGroupBegin:
    case CollectiveKind::kGroupEnd:
      break;
  }
  throw LogError("unknown collective");
}

void connect_by_a_call(c10d::Backend& backend, c10::Device device, std::optional<int64_t> peer) {
  const c10::DeviceGuard on(device);
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::StreamGuard aside(streams.getStreamFromGlobalPool(device));
  std::vector<at::Tensor> one{at::zeros({1}, at::device(device))};
  const auto work = !peer ? backend.allreduce(one)
                    : backend.getRank() < static_cast<int>(*peer)
                        ? backend.send(one, static_cast<int>(*peer), 0)
                        : backend.recv(one, static_cast<int>(*peer), 0);
  work->wait();  // so that this stream, to which the tensor's memory goes back, is behind it
}

}  // namespace understudy::server
