#include "tests/csrc/simulated_nccl_library/links.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <thread>

namespace understudy::simulated_nccl {
namespace {

constexpr int kLookMs = 2;  // for who may have aborted, and for members that have not come
constexpr timeval kAnswersWithin{0, 200'000};

int new_socket(int family) { return socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0); }

template <class Address>
sockaddr* any(Address& address) {
  return reinterpret_cast<sockaddr*>(&address);
}

// Not in the file system: nobody has to clear it away.
socklen_t address_of(const std::string& name, int rank, sockaddr_un& address) {
  const std::string all = "understudy-nccl-" + name + "-" + std::to_string(rank);
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, all.data(), std::min(all.size(), sizeof address.sun_path - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + all.size());
}

sockaddr_in on_this_host(in_port_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = port;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Tells whoever asks under the rank's name at which port it is.
class Answers {
 public:
  Answers(int asked, in_port_t port) : thread_([this, asked, port] { run(asked, port); }) {}
  ~Answers() {
    over_ = true;
    thread_.join();
  }

 private:
  void run(int asked, in_port_t port) {
    while (!over_) {
      pollfd comes{asked, POLLIN, 0};
      if (poll(&comes, 1, kLookMs) != 1) continue;
      const int fd = accept4(asked, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      send(fd, &port, sizeof port, MSG_NOSIGNAL);
      close(fd);
    }
  }
  std::atomic<bool> over_{false};
  std::thread thread_;
};

in_port_t port_of(const std::string& name, int peer) {
  sockaddr_un address;
  const socklen_t size = address_of(name, peer, address);
  in_port_t port = 0;
  const int fd = new_socket(AF_UNIX);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kAnswersWithin, sizeof kAnswersWithin);
  if (connect(fd, any(address), size) != 0 || recv(fd, &port, sizeof port, 0) != sizeof port) port = 0;
  close(fd);
  return port;
}

// As what NCCL has between hosts, of which a drill may cut it off.
int socket_of_a_peer(in_port_t port, int own) {
  sockaddr_in address = on_this_host(port);
  const int fd = new_socket(AF_INET);
  if (connect(fd, any(address), sizeof address) == 0 &&
      send(fd, &own, sizeof own, MSG_NOSIGNAL) == sizeof own)
    return fd;
  close(fd);
  return -1;
}

void send_at_once(int fd) {
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

// Bytes that have gone, or have come; -1: the peer is gone.
ssize_t moved(ssize_t result) {
  if (result > 0) return result;
  return result < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

struct Peer {
  std::deque<Outgoing> out;
  std::deque<Incoming> in;
  size_t receipts = 0;  // that are to come
  bool idle() const { return out.empty() && in.empty() && receipts == 0; }
};

}  // namespace

Links::~Links() {
  for (const auto* sockets : {&to_, &from_})
    for (const int fd : *sockets)
      if (fd >= 0) close(fd);
  for (const int fd : {listening_, asked_})
    if (fd >= 0) close(fd);
}

Outcome Links::connect(const std::string& name, const std::atomic<bool>& aborted) {
  sockaddr_un asked_at;
  const socklen_t asked_size = address_of(name, rank_, asked_at);
  sockaddr_in here = on_this_host(0);
  socklen_t here_size = sizeof here;
  asked_ = new_socket(AF_UNIX), listening_ = new_socket(AF_INET);
  if (bind(asked_, any(asked_at), asked_size) != 0 || listen(asked_, 64) != 0 ||
      bind(listening_, any(here), here_size) != 0 || listen(listening_, 64) != 0 ||
      getsockname(listening_, any(here), &here_size) != 0)
    return Outcome::kBroken;
  const Answers answers(asked_, here.sin_port);
  for (size_t missing = 2 * (count() - 1); missing > 0;) {
    if (aborted) return Outcome::kAborted;
    for (size_t peer = 0; peer < count(); peer++) {
      if (to_[peer] >= 0 || static_cast<int>(peer) == rank_) continue;
      const in_port_t port = port_of(name, static_cast<int>(peer));
      if (port == 0 || (to_[peer] = socket_of_a_peer(port, rank_)) < 0) continue;
      send_at_once(to_[peer]);
      missing--;
    }
    pollfd comes{listening_, POLLIN, 0};
    if (poll(&comes, 1, kLookMs) != 1) continue;
    const int fd = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    int peer = -1;
    if (fd < 0 || recv(fd, &peer, sizeof peer, MSG_WAITALL) != sizeof peer) return Outcome::kBroken;
    send_at_once(fd);
    from_.at(static_cast<size_t>(peer)) = fd;
    missing--;
  }
  return Outcome::kDone;
}

Outcome Links::exchange(const std::vector<Outgoing>& out, const std::vector<Incoming>& in,
                        const std::atomic<bool>& aborted) {
  std::vector<Peer> peers(count());
  for (const Outgoing& one : out) peers[static_cast<size_t>(one.peer)].out.push_back(one);
  for (const Outgoing& one : out) peers[static_cast<size_t>(one.peer)].receipts++;
  for (const Incoming& one : in) peers[static_cast<size_t>(one.peer)].in.push_back(one);
  Peer& self = peers[static_cast<size_t>(rank_)];
  for (; !self.out.empty() && !self.in.empty(); self.out.pop_front(), self.in.pop_front(), self.receipts--)
    std::memmove(self.in.front().at, self.out.front().at, self.in.front().bytes);
  for (;;) {
    std::vector<pollfd> fds;
    for (size_t i = 0; i < count(); i++) {
      Peer& peer = peers[i];
      if (peer.idle()) continue;
      const int sends = !peer.out.empty() ? POLLOUT : 0, receipts = peer.receipts != 0 ? POLLIN : 0;
      if (sends != 0 || receipts != 0) fds.push_back({to_[i], static_cast<short>(sends | receipts), 0});
      if (!peer.in.empty()) fds.push_back({from_[i], POLLIN, 0});
    }
    if (fds.empty()) return Outcome::kDone;
    if (aborted) return Outcome::kAborted;
    poll(fds.data(), fds.size(), kLookMs);
    for (size_t i = 0; i < count(); i++) {
      Peer& peer = peers[i];
      while (!peer.out.empty()) {
        Outgoing& first = peer.out.front();
        const ssize_t gone =
            first.bytes == 0 ? 0 : moved(send(to_[i], first.at, first.bytes, MSG_DONTWAIT | MSG_NOSIGNAL));
        if (gone < 0) return Outcome::kBroken;
        first.at += gone, first.bytes -= static_cast<size_t>(gone);
        if (first.bytes != 0) break;
        peer.out.pop_front();
      }
      while (!peer.in.empty()) {
        Incoming& first = peer.in.front();
        const ssize_t come =
            first.bytes == 0 ? 0 : moved(recv(from_[i], first.at, first.bytes, MSG_DONTWAIT));
        if (come < 0) return Outcome::kBroken;
        first.at += come, first.bytes -= static_cast<size_t>(come);
        if (first.bytes != 0) break;
        const char receipt = 0;
        if (send(from_[i], &receipt, 1, MSG_NOSIGNAL) != 1) return Outcome::kBroken;
        peer.in.pop_front();
      }
      if (peer.receipts != 0 && peer.out.empty()) {
        std::vector<char> receipts(peer.receipts);
        const ssize_t come = moved(recv(to_[i], receipts.data(), receipts.size(), MSG_DONTWAIT));
        if (come < 0) return Outcome::kBroken;
        peer.receipts -= static_cast<size_t>(come);
      }
    }
  }
}

}  // namespace understudy::simulated_nccl
