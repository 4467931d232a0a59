// A STAND-IN for libnccl, see stand_in.h: a collective is what waits at the gate of its stream.
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/csrc/stand_in_cuda/stand_in.h"

namespace {

std::mutex mutex;
auto& changed = *new std::condition_variable;  // never destroyed: streams wait for it as the process ends
NcclResult result = kNcclSuccess;
bool hangs = false, next_hangs = false;
std::vector<Stream>& in_progress() {
  static auto& streams = *new std::vector<Stream>;
  return streams;
}

thread_local int depth = 0;
thread_local std::vector<Stream> grouped;

NcclResult enqueue(const std::vector<Stream>& streams) {
  std::unique_lock lock(mutex);
  if (std::exchange(next_hangs, false)) changed.wait(lock, [] { return !hangs; });
  for (const Stream stream : streams) {
    if (result == kNcclInProgress)
      in_progress().push_back(stream);
    else if (result == kNcclSuccess)
      stand_in_gated(stream);
  }
  return result;
}

NcclResult collective(Stream stream) {
  if (depth == 0) return enqueue({stream});
  grouped.push_back(stream);
  return kNcclSuccess;
}

}  // namespace

extern "C" {

NcclResult ncclAllReduce(const void*, void*, std::size_t, DataType, Reduction, Communicator, Stream stream) {
  return collective(stream);
}
NcclResult ncclSend(const void*, std::size_t, DataType, int, Communicator, Stream stream) {
  return collective(stream);
}
NcclResult ncclRecv(void*, std::size_t, DataType, int, Communicator, Stream stream) {
  return collective(stream);
}
NcclResult ncclGroupStart() {
  depth++;
  return kNcclSuccess;
}
NcclResult ncclGroupEnd() {
  if (--depth > 0) return kNcclSuccess;
  const std::vector<Stream> streams = std::move(grouped);
  grouped.clear();
  return enqueue(streams);
}

void stand_in_nccl_returns(NcclResult wanted) {
  const std::lock_guard lock(mutex);
  result = wanted;
}
void stand_in_nccl_hangs(bool wanted) {
  const std::lock_guard lock(mutex);
  hangs = next_hangs = wanted;
  changed.notify_all();
}
void stand_in_nccl_progresses() {
  const std::lock_guard lock(mutex);
  for (const Stream stream : in_progress()) stand_in_gated(stream);
  in_progress().clear();
}
}
