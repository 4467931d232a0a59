#include "proxy_client/csrc/device/host_access.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

namespace understudy::client {
namespace {

constexpr char kBefore[] = "understudy: raw device pointer used by host code: address 0x";
constexpr char kAfter[] =
    " belongs to a tensor on the virtual cuda device, whose memory is in the device server and not in this "
    "process, so ctypes, NumPy, a C++ extension or another library cannot follow Tensor.data_ptr(); copy the "
    "tensor first (tensor.cpu()) and use the copy's pointer\n";

std::atomic<uintptr_t> range_begin{0}, range_end{0};
// Two, because faulthandler raises the signal again for whom it displaced, and that may be us.
struct sigaction before_us{};        // when we came first
struct sigaction below_us{};         // when we came last
std::atomic<int> passing_on{0};      // calls of below_us that have not returned
std::atomic<bool> explained{false};  // once: a handler of Python's returns to the fault for ever

void say(const char* text, size_t bytes) {
  while (bytes != 0) {
    const ssize_t written = write(STDERR_FILENO, text, bytes);
    if (written <= 0) return;
    text += written;
    bytes -= static_cast<size_t>(written);
  }
}

void explain(uintptr_t address) {
  char digits[2 * sizeof address];
  size_t first = sizeof digits;
  do {
    digits[--first] = "0123456789abcdef"[address & 15];
    address >>= 4;
  } while (address != 0);
  say(kBefore, sizeof kBefore - 1);
  say(digits + first, sizeof digits - first);
  say(kAfter, sizeof kAfter - 1);
}

void take_default_action(const siginfo_t* info) {
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  sigaction(SIGSEGV, &standard, nullptr);
  if (info->si_code <= 0) raise(SIGSEGV);  // it was sent; a fault happens again by itself when we return
}

void pass_on(const struct sigaction& to, int number, siginfo_t* info, void* context) {
  if ((to.sa_flags & SA_SIGINFO) != 0) return to.sa_sigaction(number, info, context);
  const bool fault = info->si_code > 0;  // which nobody can ignore
  if (to.sa_handler == SIG_DFL || (to.sa_handler == SIG_IGN && fault)) return take_default_action(info);
  if (to.sa_handler != SIG_IGN) to.sa_handler(number);
}

// Only what is safe in a signal handler.
void on_fault(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (info->si_code > 0 && address >= range_begin.load() && address < range_end.load() &&
      !explained.exchange(true))
    explain(address);
  const bool nested = passing_on.fetch_add(1) != 0;
  pass_on(nested ? before_us : below_us, number, info, context);
  passing_on.fetch_sub(1);
  errno = saved_errno;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_fault;
}

struct sigaction current_action() {
  struct sigaction found{};
  sigaction(SIGSEGV, nullptr, &found);
  return found;
}

void go_first() {
  struct sigaction ours{};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

void watch_host_access(const void* begin, size_t bytes) {
  range_begin.store(reinterpret_cast<uintptr_t>(begin));
  range_end.store(reinterpret_cast<uintptr_t>(begin) + bytes);
  before_us = below_us = current_action();
  go_first();
}

void renew_host_access_watch(bool faulthandler_is_enabled) {
  if (range_end.load() == 0) return;
  const struct sigaction found = current_action();
  if (!is_ours(found)) {
    below_us = found;
    if (!faulthandler_is_enabled) before_us = found;  // it was faulthandler that came before us
    go_first();
  } else if (!faulthandler_is_enabled) {
    below_us = before_us;  // it came after us, and has put us back
  }
}

}  // namespace understudy::client
