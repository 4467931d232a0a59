// Which calls of NCCL's a collective is.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <numeric>

#include "proxy_server/csrc/nccl/backend.h"
#include "proxy_server/csrc/nccl/elements.h"
#include "replay/csrc/log/log_map.h"

namespace understudy::server::nccl {

using c10d::OpType;
using replay::LogError;

namespace {

using Tensors = Backend::Tensors;

void need_fit(bool condition) {
  if (!condition) throw LogError("a collective has tensors that do not fit together");
}

// What is given to a rank and what it gets: NCCL takes their memory as it is told of.
void need_alike(const at::Tensor& given, const at::Tensor& got) {
  need_fit(given.numel() == got.numel() && given.scalar_type() == got.scalar_type());
}

Tensors together(Tensors tensors, const Tensors& more) {
  tensors.insert(tensors.end(), more.begin(), more.end());
  return tensors;
}

// The memory of a dense tensor, whatever its shape.
at::Tensor flat(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

// Whether all parts are alike: then NCCL takes them as one piece.
bool alike(const Tensors& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const at::Tensor& part) { return part.numel() == parts[0].numel(); });
}

at::Tensor room_for(const Tensors& parts) {
  return at::empty({static_cast<int64_t>(parts.size()) * parts[0].numel()}, parts[0].options());
}

at::Tensor part_of(const at::Tensor& whole, size_t index, int64_t elements) {
  return whole.narrow(0, static_cast<int64_t>(index) * elements, elements);
}

// A part for each rank, one behind the other.
Tensors parts_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  need_fit(tensor.dim() != 0);
  const bool fit =
      splits.empty() ? tensor.size(0) % size == 0
                     : splits.size() == static_cast<size_t>(size) &&
                           std::all_of(splits.begin(), splits.end(), [](int64_t one) { return one >= 0; }) &&
                           std::accumulate(splits.begin(), splits.end(), int64_t{0}) == tensor.size(0);
  need_fit(fit);
  std::vector<int64_t> lengths(static_cast<size_t>(size)), offsets(static_cast<size_t>(size));
  c10d::computeLengthsAndOffsets(splits, tensor, &lengths, &offsets);
  Tensors parts;
  for (size_t i = 0; i < lengths.size(); i++) parts.push_back(flat(tensor).narrow(0, offsets[i], lengths[i]));
  return parts;
}

}  // namespace

Backend::Started Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  need_fit(tensors.size() == 1);
  const auto calls = [tensor = tensors[0], root = static_cast<int>(options.rootRank)](
                         const Library& nccl, Handle handle, DeviceStream stream) {
    check(nccl, nccl.broadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), count_of(tensor),
                               type_of(tensor), root, handle, stream));
  };
  return start(OpType::BROADCAST, {tensors, calls});
}

Backend::Started Backend::reduce_all(OpType type, const Tensors& tensors, const c10d::ReduceOp& op) {
  const auto calls = [tensors, op](const Library& nccl, Handle handle, DeviceStream stream) {
    for (const at::Tensor& tensor : tensors)
      check(nccl, nccl.all_reduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(), count_of(tensor),
                                  type_of(tensor), reduction_of(op, tensor), handle, stream));
  };
  return start(type, {tensors, calls});
}

Backend::Started Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  need_fit(tensors.size() == 1);
  return reduce_all(OpType::ALLREDUCE, tensors, options.reduceOp);
}

Backend::Started Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, options.reduceOp);
}

Backend::Started Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  need_fit(tensors.size() == 1);
  const auto calls = [tensor = tensors[0], op = options.reduceOp, root = static_cast<int>(options.rootRank)](
                         const Library& nccl, Handle handle, DeviceStream stream) {
    check(nccl, nccl.reduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(), count_of(tensor),
                            type_of(tensor), reduction_of(op, tensor), root, handle, stream));
  };
  return start(OpType::REDUCE, {tensors, calls});
}

Backend::Started Backend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  need_fit(outputs.size() == 1 && inputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()));
  const at::Tensor input = inputs[0];
  const Tensors parts = outputs[0];
  const auto own = static_cast<size_t>(getRank());
  need_fit(parts[own].numel() == input.numel());
  for (const at::Tensor& part : parts) need_fit(part.scalar_type() == input.scalar_type());
  if (!alike(parts)) {
    const auto calls = [input, parts, own](const Library& nccl, Handle handle, DeviceStream stream) {
      for (size_t i = 0; i < parts.size(); i++)
        check(nccl,
              nccl.broadcast((i == own ? input : parts[i]).const_data_ptr(), parts[i].mutable_data_ptr(),
                             count_of(parts[i]), type_of(parts[i]), static_cast<int>(i), handle, stream));
    };
    return start(OpType::ALLGATHER, {together(inputs, parts), calls});
  }
  // Its memory is the stream's, as are all that work on it.
  const auto whole = std::make_shared<at::Tensor>();
  return start(OpType::ALLGATHER,
               {together(inputs, parts),
                [input, whole](const Library& nccl, Handle handle, DeviceStream stream) {
                  check(nccl, nccl.all_gather(input.const_data_ptr(), whole->mutable_data_ptr(),
                                              count_of(input), type_of(input), handle, stream));
                },
                [whole, parts] { *whole = room_for(parts); },
                [whole, parts] {
                  for (size_t i = 0; i < parts.size(); i++)
                    flat(parts[i]).copy_(part_of(*whole, i, parts[i].numel()), /*non_blocking=*/true);
                }});
}

Backend::Started Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions&) {
  need_fit(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * getSize());
  const auto calls = [output, input](const Library& nccl, Handle handle, DeviceStream stream) {
    check(nccl, nccl.all_gather(input.const_data_ptr(), output.mutable_data_ptr(), count_of(input),
                                type_of(input), handle, stream));
  };
  return start(OpType::_ALLGATHER_BASE, {{output, input}, calls});
}

Backend::Started Backend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  need_fit(inputs.size() == 1);
  const auto root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (root == getRank()) {
    need_fit(outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()));
    parts = outputs[0];
    for (const at::Tensor& part : parts) need_alike(inputs[0], part);
  }
  const auto calls = [input = inputs[0], parts, root](const Library& nccl, Handle handle,
                                                      DeviceStream stream) {
    for (size_t i = 0; i < parts.size(); i++)
      receive_from(nccl, parts[i], static_cast<int>(i), handle, stream);
    send_to(nccl, input, root, handle, stream);
  };
  return start(OpType::GATHER, {together(inputs, parts), calls});
}

Backend::Started Backend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  need_fit(outputs.size() == 1);
  const auto root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (root == getRank()) {
    need_fit(inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(getSize()));
    parts = inputs[0];
    for (const at::Tensor& part : parts) need_alike(part, outputs[0]);
  }
  const auto calls = [output = outputs[0], parts, root](const Library& nccl, Handle handle,
                                                        DeviceStream stream) {
    for (size_t i = 0; i < parts.size(); i++) send_to(nccl, parts[i], static_cast<int>(i), handle, stream);
    receive_from(nccl, output, root, handle, stream);
  };
  return start(OpType::SCATTER, {together(outputs, parts), calls});
}

Backend::Started Backend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  need_fit(outputs.size() == 1 && inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(getSize()));
  const at::Tensor output = outputs[0];
  const Tensors parts = inputs[0];
  const auto own = static_cast<size_t>(getRank());
  need_fit(parts[own].numel() == output.numel());
  for (const at::Tensor& part : parts) need_fit(part.scalar_type() == output.scalar_type());
  const auto op = options.reduceOp;
  if (!alike(parts)) {
    const auto calls = [output, parts, own, op](const Library& nccl, Handle handle, DeviceStream stream) {
      for (size_t i = 0; i < parts.size(); i++)
        check(nccl, nccl.reduce(parts[i].const_data_ptr(), i == own ? output.mutable_data_ptr() : nullptr,
                                count_of(parts[i]), type_of(parts[i]), reduction_of(op, parts[i]),
                                static_cast<int>(i), handle, stream));
    };
    return start(OpType::REDUCE_SCATTER, {together(outputs, parts), calls});
  }
  const auto whole = std::make_shared<at::Tensor>();
  return start(
      OpType::REDUCE_SCATTER,
      {together(outputs, parts),
       [output, whole, op](const Library& nccl, Handle handle, DeviceStream stream) {
         check(nccl, nccl.reduce_scatter(whole->const_data_ptr(), output.mutable_data_ptr(), count_of(output),
                                         type_of(output), reduction_of(op, output), handle, stream));
       },
       [whole, parts] {
         *whole = room_for(parts);
         for (size_t i = 0; i < parts.size(); i++)
           part_of(*whole, i, parts[i].numel()).copy_(flat(parts[i]), /*non_blocking=*/true);
       }});
}

Backend::Started Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  need_fit(output.scalar_type() == input.scalar_type() && input.numel() == output.numel() * getSize());
  const auto calls = [output, input, op = options.reduceOp](const Library& nccl, Handle handle,
                                                            DeviceStream stream) {
    check(nccl, nccl.reduce_scatter(input.const_data_ptr(), output.mutable_data_ptr(), count_of(output),
                                    type_of(output), reduction_of(op, output), handle, stream));
  };
  return start(OpType::_REDUCE_SCATTER_BASE, {{output, input}, calls});
}

Backend::Started Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  Tensors to = parts_of(output, output_splits, getSize()), from = parts_of(input, input_splits, getSize());
  return alltoall(to, from, options);
}

Backend::Started Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  const auto size = static_cast<size_t>(getSize());
  need_fit(outputs.size() == size && inputs.size() == size);
  const auto own = static_cast<size_t>(getRank());
  need_alike(inputs[own], outputs[own]);
  const auto calls = [outputs, inputs](const Library& nccl, Handle handle, DeviceStream stream) {
    for (size_t i = 0; i < inputs.size(); i++) {
      if (inputs[i].numel() != 0) send_to(nccl, inputs[i], static_cast<int>(i), handle, stream);
      if (outputs[i].numel() != 0) receive_from(nccl, outputs[i], static_cast<int>(i), handle, stream);
    }
  };
  return start(OpType::ALLTOALL, {together(inputs, outputs), calls});
}

// Who waits for the sum of one element waits for all.
Backend::Started Backend::barrier(const c10d::BarrierOptions&) {
  const c10::Device here = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  return reduce_all(OpType::BARRIER, {at::zeros({1}, at::device(here).dtype(at::kFloat))},
                    c10d::ReduceOp::SUM);
}

}  // namespace understudy::server::nccl
