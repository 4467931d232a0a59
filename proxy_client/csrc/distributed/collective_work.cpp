#include "proxy_client/csrc/distributed/collective_work.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue_inl.h>

#include "proxy_client/csrc/device/streams.h"
#include "proxy_client/csrc/session.h"

namespace understudy::client {

CollectiveWork::CollectiveWork(int rank, Details details, std::vector<at::Tensor> outputs)
    : c10d::Work(rank, details.type), details_(std::move(details)), outputs_(std::move(outputs)) {}

bool CollectiveWork::wait(std::chrono::milliseconds) {
  synchronize();
  return true;
}

void CollectiveWork::synchronize() {
  if (details_.barrier_of != 0) {
    client::synchronize(replay::WaitFor::kBarrier, details_.barrier_of);
  } else if (LogWriter* log = log_if_open()) {
    raise_if_failed(*log);
    blockCurrentStream();
  }
}

void CollectiveWork::blockCurrentStream() {
  if (details_.mark != 0) wait_in_stream(current_stream(details_.device), details_.mark);
}

int CollectiveWork::sourceRank() const {
  return details_.any_source ? static_cast<int>(details_.any_source->item<int64_t>()) : details_.source;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{{c10::kCUDA, details_.device}});
  const RecordedAt end(details_.mark);
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

}  // namespace understudy::client
