#include "proxy_client/csrc/distributed/process_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "proxy_client/csrc/call/call_encoding.h"
#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/streams.h"
#include "proxy_client/csrc/distributed/collective_types.h"
#include "proxy_client/csrc/distributed/collective_work.h"

namespace understudy::client {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using replay::CollectiveHeader;
using replay::CollectiveKind;
using Tensors = ProcessGroup::Tensors;
using WorkPtr = ProcessGroup::WorkPtr;

constexpr size_t kHeaderWords = sizeof(CollectiveHeader) / sizeof(uint64_t);

std::vector<uint8_t> random_uid() {
  std::random_device random;
  std::vector<uint8_t> uid(16);
  for (size_t i = 0; i < uid.size(); i += sizeof(uint32_t)) {
    const uint32_t part = random();
    std::memcpy(uid.data() + i, &part, sizeof part);
  }
  return uid;
}

// The same store may serve several groups one after the other (destroy and init again): each rank counts the
// groups it has made from it, so that nobody takes the identity of an earlier one.
std::vector<uint8_t> agree_on_uid(c10d::Store& store, int rank) {
  const int64_t epoch = store.add("understudy/epoch/" + std::to_string(rank), 1);
  const std::string key = "understudy/uid/" + std::to_string(epoch);
  if (rank == 0) store.set(key, random_uid());
  std::vector<uint8_t> uid = store.get(key);
  TORCH_CHECK_WITH(DistStoreError, uid.size() == 16, "the store holds no communicator identity under ", key);
  return uid;
}

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors flat;
  for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

uint64_t code(const ReduceOp& op, const Tensor& tensor) {
  const auto type = static_cast<ReduceOp::RedOpType>(op);
  if (type == ReduceOp::SUM && tensor.scalar_type() == at::kBool) return ReduceOp::MAX;  // as NCCL is asked
  if (type == ReduceOp::PREMUL_SUM) return ReduceOp::SUM;
  TORCH_CHECK_NOT_IMPLEMENTED(type <= ReduceOp::BXOR,
                              "the virtual device does not support this reduce operation");
  return static_cast<uint64_t>(type);
}

void check(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK_WITH(ValueError, tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided,
                     "Tensors must be CUDA and dense");
    TORCH_CHECK_WITH(ValueError,
                     tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg(),
                     "Tensors must be contiguous");
    check_collective_type(tensor);
  }
}

bool multiplies(const ReduceOp& op) { return static_cast<ReduceOp::RedOpType>(op) == ReduceOp::PREMUL_SUM; }

// NCCL multiplies before it adds; here an operator does.
Tensor multiplied(const Tensor& tensor, const ReduceOp& op, bool in_place) {
  const at::NoGradGuard unrecorded;
  TORCH_CHECK_VALUE(op.supplement_, "PREMUL_SUM needs a factor: torch.distributed._make_nccl_premul_sum");
  const auto& by =
      static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);  // its name in 2.11, too
  if (in_place)
    return by.tensor_factor.defined() ? tensor.mul_(by.tensor_factor) : tensor.mul_(by.double_factor);
  const Tensor product = at::empty_like(tensor);  // of the tensor's type, whatever the factor's is
  product.copy_(tensor);
  return multiplied(product, op, /*in_place=*/true);
}

// What is reduced of these: themselves, but for one reduction.
Tensors operands(const Tensors& tensors, const ReduceOp& op, bool in_place) {
  check(tensors);  // before any of them changes
  for (const Tensor& tensor : tensors) check_reduction(op, tensor);
  if (!multiplies(op)) return tensors;
  Tensors products;
  for (const Tensor& tensor : tensors) products.push_back(multiplied(tensor, op, in_place));
  return products;
}

bool is_message(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive ||
         kind == CollectiveKind::kReceiveAny;
}

// Who sent what any rank may send, the server asks at once.
bool is_groupable(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive;
}

std::vector<uint64_t> group_mark(CollectiveKind kind) {
  std::vector<uint64_t> words(kHeaderWords);
  words[0] = static_cast<uint64_t>(kind);
  return words;
}

// `whole` is to hold a part of the size of `part` for each rank; shapes do not matter.
void check_whole_and_part(const Tensor& whole, const char* name_of_whole, const Tensor& part,
                          const char* name_of_part, int ranks) {
  TORCH_CHECK_WITH(TypeError, whole.dtype() == part.dtype(), name_of_whole,
                   " tensor must have the same type as ", name_of_part, " tensor");
  TORCH_CHECK_WITH(ValueError, whole.numel() == part.numel() * ranks, name_of_whole,
                   " tensor size must be equal to world_size times ", name_of_part, " tensor size");
}

}  // namespace

struct ProcessGroup::Request {
  CollectiveKind kind;
  OpType type;
  Tensors inputs{}, outputs{};
  uint64_t reduce_op = 0;
  int peer = 0;
  int tag = 0;
  std::vector<int64_t> output_splits{}, input_splits{};
  std::optional<c10::Device> device{};
  std::optional<Tensor> any_source{};
};

ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           OptionsPtr options)
    : c10d::Backend(rank, size), options_(std::move(options)) {
  const std::vector<uint8_t> uid = agree_on_uid(*store, rank);
  std::memcpy(&uid_low_, uid.data(), sizeof uid_low_);
  std::memcpy(&uid_high_, uid.data() + sizeof uid_low_, sizeof uid_high_);
}

ProcessGroup::~ProcessGroup() {
  try {
    shutdown();
  } catch (const std::exception&) {
    // The session is lost; the next call says so.
  }
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  options_->timeout = timeout;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  auto own = c10::make_intrusive<ProcessGroupOptions>();
  own->timeout = options->timeout;
  own->group_name = options->group_name;
  own->global_ranks_in_group = options->global_ranks_in_group;
  return c10::make_intrusive<ProcessGroup>(store, static_cast<int>(mine - ranks.begin()),
                                           static_cast<int>(ranks.size()), std::move(own));
}

uint64_t ProcessGroup::getSequenceNumberForGroup() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

void ProcessGroup::eagerConnectSingleDevice(at::Device device) {
  LogWriter& log = log_for(resolve_device(device).index());
  std::lock_guard<std::mutex> lock(mutex_);
  ensure_communicator(log);
}

void ProcessGroup::shutdown() {
  std::lock_guard<std::mutex> lock(mutex_);
  over_ = true;
  LogWriter* log = log_if_open();
  if (communicator_ != 0 && log) append(*log, Kind::kCommunicatorDestroy, communicator_);
  communicator_ = 0;
}

void ProcessGroup::ensure_communicator(LogWriter& log) {
  TORCH_CHECK_WITH(DistBackendError, !over_, "this process group was shut down");
  if (communicator_ != 0) return;
  communicator_ = new_handles();
  append(log, Kind::kCommunicatorCreate, communicator_, 5, [&](uint64_t* body) {
    body[0] = uid_low_;
    body[1] = uid_high_;
    body[2] = static_cast<uint64_t>(getRank());
    body[3] = static_cast<uint64_t>(getSize());
    body[4] = static_cast<uint64_t>(options_->timeout.count());
  });
}

c10::DeviceIndex ProcessGroup::device_of(const Request& request) const {
  for (const Tensors* tensors : {&request.inputs, &request.outputs})
    if (!tensors->empty()) return tensors->front().device().index();
  if (request.device && request.device->is_cuda()) return resolve_device(*request.device).index();
  if (const auto bound = getBoundDeviceId()) return bound->index();
  return bound_device();
}

WorkPtr ProcessGroup::submit(const Request& request) {
  check(request.inputs);
  check(request.outputs);
  const c10::DeviceIndex device = device_of(request);
  LogWriter& log = log_for(device);
  raise_if_failed(log);

  WordBuffer words;
  words.extend(kHeaderWords);
  for (const Tensors* tensors : {&request.inputs, &request.outputs})
    for (const Tensor& tensor : *tensors) append_raw_tensor(as_it_travels(tensor), words);
  for (const auto* splits : {&request.output_splits, &request.input_splits})
    for (const int64_t split : *splits) words.push(static_cast<uint64_t>(split));
  CollectiveHeader header{static_cast<uint64_t>(request.kind),
                          request.reduce_op,
                          static_cast<uint64_t>(request.peer),
                          static_cast<uint64_t>(request.tag),
                          /*sequence=*/0,
                          request.inputs.size(),
                          request.outputs.size(),
                          request.output_splits.size() + request.input_splits.size()};
  // The same number on every rank, which that of a message is not.
  const bool between_all = !is_message(request.kind);
  uint64_t of_all = 0, mark = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ensure_communicator(log);
    header.sequence = ++sequence_;
    if (between_all) of_all = ++of_all_;
    std::memcpy(words.data(), &header, sizeof header);
    if (group_ && is_groupable(request.kind)) {
      group_->bodies.emplace_back(words.data(), words.data() + words.size());
      for (const Tensors* tensors : {&request.inputs, &request.outputs})
        group_->tensors.insert(group_->tensors.end(), tensors->begin(), tensors->end());
    } else {
      append(log, Kind::kCollective, communicator_, words.size(),
             [&](uint64_t* body) { std::copy_n(words.data(), words.size(), body); });
      mark = mark_work(device, communicator_);
    }
  }
  if (between_all) commit_after_collective(log, getSize(), of_all);
  CollectiveWork::Details details{request.type,
                                  device,
                                  header.sequence,
                                  request.peer,
                                  request.any_source,
                                  request.kind == CollectiveKind::kBarrier ? communicator_ : 0,
                                  mark};
  return c10::make_intrusive<CollectiveWork>(getRank(), std::move(details), request.outputs);
}

bool ProcessGroup::supportsCoalescing() const { return !driver_is_cpu(); }

void ProcessGroup::startCoalescing() {
  if (driver_is_cpu()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  group_.emplace();
}

WorkPtr ProcessGroup::endCoalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::optional<Group> group = std::exchange(group_, std::nullopt);
  LogWriter* log = log_if_open();
  if (!group || !log) return nothing_to_do();
  if (group->bodies.empty())  // of other calls, which began one by one
    return nothing_to_do(communicator_ != 0 ? mark_work(bound_device(), communicator_) : 0);
  ensure_communicator(*log);
  std::vector<std::vector<uint64_t>> bodies{group_mark(CollectiveKind::kGroupBegin)};
  bodies.insert(bodies.end(), group->bodies.begin(), group->bodies.end());
  bodies.push_back(group_mark(CollectiveKind::kGroupEnd));
  try {
    log->append_together(Kind::kCollective, communicator_, bodies);
  } catch (const replay::RemoteError& error) {
    raise_as_torch_error(error);
  }
  return nothing_to_do(mark_work(bound_device(), communicator_));
}

WorkPtr ProcessGroup::nothing_to_do(uint64_t mark) const {
  CollectiveWork::Details details{OpType::COALESCED, bound_device()};
  details.mark = mark;
  return c10::make_intrusive<CollectiveWork>(getRank(), std::move(details), Tensors{});
}

WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return submit({.kind = CollectiveKind::kBroadcast,
                 .type = OpType::BROADCAST,
                 .outputs = tensors,
                 .peer = static_cast<int>(options.rootRank)});
}

WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return submit({.kind = CollectiveKind::kAllReduce,
                 .type = OpType::ALLREDUCE,
                 .outputs = operands(tensors, options.reduceOp, /*in_place=*/true),
                 .reduce_op = code(options.reduceOp, tensors.at(0))});
}

WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return submit({.kind = CollectiveKind::kReduce,
                 .type = OpType::REDUCE,
                 .outputs = operands(tensors, options.reduceOp, options.rootRank == getRank()),
                 .reduce_op = code(options.reduceOp, tensors.at(0)),
                 .peer = static_cast<int>(options.rootRank)});
}

WorkPtr ProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions&) {
  return submit({.kind = CollectiveKind::kAllGather,
                 .type = OpType::ALLGATHER,
                 .inputs = inputs,
                 .outputs = flatten(outputs)});
}

WorkPtr ProcessGroup::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) {
  check_whole_and_part(output, "output", input, "input", getSize());
  return submit({.kind = CollectiveKind::kAllGatherBase,
                 .type = OpType::_ALLGATHER_BASE,
                 .inputs = {input},
                 .outputs = {output}});
}

// Lists come as [rank][tensor] here; one record gathers one tensor.
WorkPtr ProcessGroup::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  WorkPtr work;
  for (size_t i = 0; i < inputs.size(); i++) {
    Tensors gathered;
    for (const Tensors& of_rank : outputs) gathered.push_back(of_rank.at(i));
    std::vector<Tensors> lists{std::move(gathered)};
    Tensors input{inputs[i]};
    work = allgather(lists, input, options);
  }
  return work ? work : nothing_to_do();
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  WorkPtr work;
  for (size_t i = 0; i < inputs.size(); i++) work = _allgather_base(outputs.at(i), inputs[i], options);
  return work ? work : nothing_to_do();
}

WorkPtr ProcessGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) {
  return submit({.kind = CollectiveKind::kGather,
                 .type = OpType::GATHER,
                 .inputs = inputs,
                 .outputs = flatten(outputs),
                 .peer = static_cast<int>(options.rootRank)});
}

WorkPtr ProcessGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& options) {
  return submit({.kind = CollectiveKind::kScatter,
                 .type = OpType::SCATTER,
                 .inputs = flatten(inputs),
                 .outputs = outputs,
                 .peer = static_cast<int>(options.rootRank)});
}

WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  return submit({.kind = CollectiveKind::kReduceScatter,
                 .type = OpType::REDUCE_SCATTER,
                 .inputs = operands(flatten(inputs), options.reduceOp, /*in_place=*/false),
                 .outputs = outputs,
                 .reduce_op = code(options.reduceOp, outputs.at(0))});
}

WorkPtr ProcessGroup::_reduce_scatter_base(Tensor& output, Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  check_whole_and_part(input, "input", output, "output", getSize());
  return submit({.kind = CollectiveKind::kReduceScatterBase,
                 .type = OpType::_REDUCE_SCATTER_BASE,
                 .inputs = operands({input}, options.reduceOp, /*in_place=*/false),
                 .outputs = {output},
                 .reduce_op = code(options.reduceOp, output)});
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  WorkPtr work;
  for (size_t i = 0; i < inputs.size(); i++) work = _reduce_scatter_base(outputs.at(i), inputs[i], options);
  return work ? work : nothing_to_do();
}

WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  return submit(
      {.kind = CollectiveKind::kAllToAll, .type = OpType::ALLTOALL, .inputs = inputs, .outputs = outputs});
}

WorkPtr ProcessGroup::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) {
  Request request{.kind = CollectiveKind::kAllToAllBase,
                  .type = OpType::ALLTOALL_BASE,
                  .inputs = {input},
                  .outputs = {output}};
  if (!output_splits.empty() || !input_splits.empty()) {
    // Both or none travel: an empty list means equal parts.
    const auto ranks = static_cast<size_t>(getSize());
    const auto complete = [&](const std::vector<int64_t>& splits, const Tensor& tensor) {
      return splits.empty() ? std::vector<int64_t>(ranks, tensor.size(0) / getSize()) : splits;
    };
    request.output_splits = complete(output_splits, output);
    request.input_splits = complete(input_splits, input);
  }
  return submit(request);
}

WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  Request request{.kind = CollectiveKind::kBarrier, .type = OpType::BARRIER, .device = options.device};
  if (!request.device && !options.device_ids.empty())
    request.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(options.device_ids[0]));
  return submit(request);
}

WorkPtr ProcessGroup::send(Tensors& tensors, int destination, int tag) {
  return submit({.kind = CollectiveKind::kSend,
                 .type = OpType::SEND,
                 .inputs = tensors,
                 .peer = destination,
                 .tag = tag});
}

WorkPtr ProcessGroup::recv(Tensors& tensors, int source, int tag) {
  return submit({.kind = CollectiveKind::kReceive,
                 .type = OpType::RECV,
                 .outputs = tensors,
                 .peer = source,
                 .tag = tag});
}

// A second output, one int64 on the device, tells who the sender was.
WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  TORCH_CHECK_WITH(ValueError, tensors.size() == 1, "receiving needs exactly one tensor");
  const Tensor source = at::empty({1}, tensors[0].options().dtype(at::kLong));
  return submit({.kind = CollectiveKind::kReceiveAny,
                 .type = OpType::RECVANYSOURCE,
                 .outputs = {tensors[0], source},
                 .tag = tag,
                 .any_source = source});
}

}  // namespace understudy::client
