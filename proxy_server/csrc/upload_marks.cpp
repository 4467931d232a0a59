#include "proxy_server/csrc/upload_marks.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace understudy::server {

void UploadMarks::mark(uint64_t commit) {
  if (device_.is_cpu()) return;
  c10::Event event(device_.type());
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  events_.insert_or_assign(commit, std::move(event));
}

void UploadMarks::wait(uint64_t commit) {
  const auto it = events_.lower_bound(commit);
  if (it == events_.end()) return;
  it->second.synchronize();
  events_.erase(events_.begin(), std::next(it));
}

}  // namespace understudy::server
