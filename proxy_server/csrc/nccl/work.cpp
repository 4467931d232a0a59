#include "proxy_server/csrc/nccl/work.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace understudy::server::nccl {

Work::Work(c10d::OpType type, std::shared_ptr<Communicator> communicator, c10::Event end,
           std::vector<at::Tensor> tensors)
    : c10d::Work(-1, type),
      communicator_(std::move(communicator)),
      end_(std::move(end)),
      tensors_(std::move(tensors)) {}

bool Work::isCompleted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (exception_ || end_.query()) return true;
  exception_ = communicator_->problem();
  return exception_ != nullptr;
}

bool Work::wait(std::chrono::milliseconds) {
  const c10::Device device = communicator_->device();
  end_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return true;
}

void Work::synchronize() { wait(kNoTimeout); }

}  // namespace understudy::server::nccl
