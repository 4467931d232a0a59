#include "proxy_server/csrc/nccl/backend.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "proxy_server/csrc/nccl/elements.h"
#include "proxy_server/csrc/nccl/work.h"
#include "replay/csrc/log/log_map.h"

namespace understudy::server::nccl {

using c10d::OpType;
using replay::LogError;

namespace {

c10::Device gpu_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || !tensor.is_non_overlapping_and_dense())
    throw LogError("Tensors must be CUDA and dense");
  return tensor.device();
}

}  // namespace

Backend::Backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds limit)
    : c10d::Backend(rank, size), store_(std::move(store)), limit_(limit) {
  library();
}

Backend::~Backend() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, communicator] : communicators_) communicator->give_up();
}

void Backend::abort() {
  aborted_ = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, communicator] : communicators_) communicator->abort();
}

void Backend::check_alive() const {
  if (aborted_) throw std::runtime_error("NCCL's communicator was aborted");
}

UniqueId Backend::shared_id(const std::string& name, bool tells) {
  UniqueId id{};
  if (tells) {
    check(library(), library().get_unique_id(&id));
    const auto* const bytes = reinterpret_cast<const uint8_t*>(id.bytes);
    store_->set(name, std::vector<uint8_t>(bytes, bytes + sizeof id.bytes));
    return id;
  }
  const std::vector<uint8_t> told = store_->get(name);
  if (told.size() != sizeof id.bytes) throw std::runtime_error("a peer told an id that is none of NCCL's");
  std::memcpy(id.bytes, told.data(), sizeof id.bytes);
  return id;
}

Communicator& Backend::connected(const std::string& name, int rank, int size, c10::Device device) {
  check_alive();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto known = communicators_.find(name); known != communicators_.end()) return *known->second;
  }
  const UniqueId id = shared_id(name, rank == 0);
  const std::shared_ptr<Communicator> made = Communicator::begin(id, rank, size, device, limit_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    communicators_[name] = made;
    if (aborted_) made->abort();
  }
  made->wait_until_ready();
  return *made;
}

Communicator& Backend::of_all(c10::Device device) { return connected("all", getRank(), getSize(), device); }

Communicator& Backend::of_pair(int peer, c10::Device device) {
  const auto [low, high] = std::minmax({getRank(), peer});
  if (low < 0 || low == high || high >= getSize()) throw LogError("a message names an impossible rank");
  return connected(std::to_string(low) + ":" + std::to_string(high), getRank() == low ? 0 : 1, 2, device);
}

Backend::Started Backend::start(OpType type, Call call) {
  for (const at::Tensor& tensor : call.tensors) gpu_of(tensor);
  if (group_) {
    group_->push_back(std::move(call));
    return {};
  }
  Communicator& communicator = of_all(gpu_of(call.tensors.at(0)));
  std::vector<Call> one;
  one.push_back(std::move(call));
  return start_on(communicator, type, std::move(one));
}

Backend::Started Backend::start_on(Communicator& communicator, OpType type, std::vector<Call> calls) {
  const c10::Device device = communicator.device();
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = communicator.stream();
  c10::Event begin(device.type()), end(device.type());
  begin.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  begin.block(stream);
  const c10::StreamGuard on(stream);
  for (const Call& call : calls)
    if (call.before) call.before();
  communicator.issue([&calls](const Library& nccl, Handle handle, DeviceStream in) {
    for (const Call& call : calls) call.calls(nccl, handle, in);
  });
  for (const Call& call : calls)
    if (call.after) call.after();
  end.record(stream);
  communicator.given();
  Tensors all;
  for (const Call& call : calls) all.insert(all.end(), call.tensors.begin(), call.tensors.end());
  return c10::make_intrusive<Work>(type, communicator.shared_from_this(), std::move(end), std::move(all));
}

void Backend::startCoalescing() { group_.emplace(); }

Backend::Started Backend::endCoalescing() {
  std::vector<Call> calls = std::exchange(group_, std::nullopt).value_or(std::vector<Call>());
  if (calls.empty()) return {};
  Communicator& communicator = of_all(gpu_of(calls.front().tensors.at(0)));
  return start_on(communicator, OpType::COALESCED, std::move(calls));
}

// A message to oneself is one of a group, or an error.
Backend::Started Backend::message(OpType type, const Tensors& tensors, int peer) {
  if (tensors.size() != 1) throw LogError("a message has the wrong number of tensors");
  const at::Tensor& tensor = tensors[0];
  const bool pair = !group_;
  const int rank = pair ? (peer > getRank() ? 1 : 0) : peer;  // in its communicator
  Call call{{tensor}, [tensor, type, rank](const Library& nccl, Handle handle, DeviceStream stream) {
              if (type == OpType::SEND)
                send_to(nccl, tensor, rank, handle, stream);
              else
                receive_from(nccl, tensor, rank, handle, stream);
            }};
  if (!pair) return start(type, std::move(call));
  Communicator& communicator = of_pair(peer, gpu_of(tensor));
  std::vector<Call> one;
  one.push_back(std::move(call));
  return start_on(communicator, type, std::move(one));
}

Backend::Started Backend::send(Tensors& tensors, int to, int) { return message(OpType::SEND, tensors, to); }
Backend::Started Backend::recv(Tensors& tensors, int from, int) {
  return message(OpType::RECV, tensors, from);
}
Backend::Started Backend::recvAnysource(Tensors&, int) {
  throw LogError("NCCL does not support recvAnysource");
}

}  // namespace understudy::server::nccl
