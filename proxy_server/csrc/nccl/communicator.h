// One of NCCL's communicators. Nobody who waits for it waits longer than until it is aborted: it is made
// non-blocking, and who needs it asks it again and again whether it is ready.
//
// It is made of an id that one member tells the others. To split it from the job's largest one
// (ncclCommSplit) would save that, but all members of that one would have to do so at the same place among
// their calls, also those who are not to be members of the new one; and a rank does not know when two others
// come to use a group of theirs for the first time.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "proxy_server/csrc/nccl/library.h"

namespace understudy::server::nccl {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Begins to connect; wait_until_ready() tells when it has. `limit`: for that, and for each call to begin.
  static std::shared_ptr<Communicator> begin(const UniqueId& id, int rank, int size, c10::Device device,
                                             std::chrono::milliseconds limit);

  // What is to run together. Each call of NCCL's goes through check().
  using Calls = std::function<void(const Library&, Handle, DeviceStream)>;
  // Returns when they are in the stream.
  void issue(const Calls& calls);
  void wait_until_ready();

  // From any thread: ends what runs and whoever waits, and does not wait itself.
  void abort();
  // To be called by its last user. What is queued runs to its end, if it does so before long; then its memory
  // is given back. Does not wait for that.
  void give_up();

  // What has been given to the stream since the last call of issue() belongs to that.
  void given();
  // What NCCL found out since about a peer or the network; none: nothing, or it was aborted.
  std::exception_ptr problem();

  c10::Device device() const { return device_; }
  const c10::Stream& stream() const { return stream_; }

  Communicator(c10::Device device, std::chrono::milliseconds limit);

 private:
  using Lock = std::unique_lock<std::mutex>;
  enum class State { kBusy, kReady, kRevoked, kGone };
  std::runtime_error error(Result result);
  void check_alive() const;
  Lock lock_unless_aborted();
  bool has_passed();
  void stop();
  void end();

  const Library& nccl_;
  const c10::Device device_;
  const std::chrono::milliseconds limit_;
  const c10::Stream stream_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // calls of NCCL's with one communicator must not overlap
  Handle handle_ = nullptr;
  State state_ = State::kBusy;
  std::mutex last_mutex_;
  std::optional<c10::Event> last_;  // the end of what it was given last: others may use its stream, too
};

}  // namespace understudy::server::nccl
