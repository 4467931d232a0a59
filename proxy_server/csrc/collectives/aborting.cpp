// Getting out of collectives whose peers are gone, at once and without a new process.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "proxy_server/csrc/collectives/collectives.h"
#include "replay/csrc/log/futex.h"

namespace understudy::server {
namespace {

constexpr uint64_t kEndWithinNs = 100000000;  // all collectives that were aborted
constexpr useconds_t kAbortLookUs = 200;

// ProcessGroupGloo::abort() of PyTorch 2.13 does not wake a wait for a peer that is alive; the end of its
// sockets does, at once. Only communicators have Internet sockets in this process (our gRPC is on Unix
// sockets).
void shut_down_peer_sockets() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    int listening = 0;
    socklen_t listening_size = sizeof listening;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) continue;
    if (address.ss_family != AF_INET && address.ss_family != AF_INET6) continue;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &listening_size) == 0 && listening != 0)
      continue;
    shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace

uint64_t Communicators::deadline_after_abort() { return replay::now_ns() + kEndWithinNs; }

// Gloo of PyTorch 2.13 may miss that its sockets are gone if that happens while a collective begins; such a
// collective waits until its time is out. It does nothing any more, and what it would have written goes out
// of use with the rewind; only its tensors and its communicator must live on as long as it does.
bool Communicators::ends(InFlight& f, uint64_t until_ns) const {
  if (!f.may_miss_abort && !f.waiting) return true;
  for (; !is_over(f); usleep(kAbortLookUs))
    if (replay::now_ns() > until_ns) return false;
  return true;
}

void Communicators::forget_in_flight(BufferTable& table) {
  cut_short_.store(false);
  queued_.clear();
  group_.reset();
  std::erase_if(abandoned_, is_over);
  if (abandoned_.empty()) abandoned_backends_.clear();
  const uint64_t until_ns = deadline_after_abort();
  for (InFlight& f : in_flight_) {
    if (!ends(f, until_ns)) {
      abandoned_.push_back(std::move(f));
      continue;
    }
    if (f.waiting) continue;
    try {
      f.work->wait();  // its threads must have left our memory before we bring old content back
    } catch (const std::exception&) {
      // Expected: it was aborted.
    }
  }
  in_flight_.clear();
  for (auto& [handle, b] : table.buffers()) b.in_flight = false;
  std::vector<c10::intrusive_ptr<c10d::Backend>> old;
  {
    std::lock_guard<std::mutex> lock(backends_mutex_);
    for (auto& [handle, c] : communicators_) {
      old.push_back(std::move(c.backend));
      c.reached.clear();
      if (c.connecting && c.connecting->waiting->is_over()) old.push_back(c.connecting->backend);
      c.connecting.reset();
      c.deferred.reset();
    }
  }
  if (!abandoned_.empty())
    std::move(old.begin(), old.end(), std::back_inserter(abandoned_backends_));
  else if (driver_.device().is_cpu() && !old.empty())
    Waiting::begin([old = std::move(old)] {});  // Gloo's threads look only each 10 ms whether they are to end
}

void Communicators::abort() {
  aborted_.store(true);
  std::lock_guard<std::mutex> lock(backends_mutex_);
  for (auto& [handle, c] : communicators_)
    if (c.backend) {
      cut_short_.store(true);
      c.backend->abort();
    }
  // What is being connected ends by itself: who steers this server cancels its meeting with the others, and
  // NCCL's is left behind (reach()).
  shut_down_peer_sockets();
}

void Communicators::cut_off() {
  const std::lock_guard<std::mutex> lock(backends_mutex_);
  shut_down_peer_sockets();
}

void Communicators::close() {
  abort();
  queued_.clear();
  group_.reset();
  in_flight_.clear();
  std::map<uint64_t, Communicator> old;
  std::lock_guard<std::mutex> lock(backends_mutex_);
  old.swap(communicators_);
  std::erase_if(abandoned_, is_over);
  if (abandoned_.empty()) return;
  // To destroy these would wait for them.
  static auto& left = *std::make_unique<std::vector<c10::intrusive_ptr<c10d::Backend>>>().release();
  std::move(abandoned_backends_.begin(), abandoned_backends_.end(), std::back_inserter(left));
}

}  // namespace understudy::server
