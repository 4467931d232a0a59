#include "proxy_client/csrc/call/thread_state.h"

#include <c10/core/AutogradState.h>

#include <memory>

namespace understudy::client {
namespace detail {

thread_local ThreadState* thread_state_pointer = nullptr;

}  // namespace detail

namespace {

// Ends with its thread; what a later destructor of the thread still calls gets a state that nobody ends.
struct Owner {
  std::unique_ptr<ThreadState> state;
  bool ended = false;
  ~Owner() {
    ended = true;
    detail::thread_state_pointer = nullptr;
  }
};

}  // namespace

ThreadState& make_thread_state() {
  // A backward pass runs in the thread that asks for it, as on the CPU. PyTorch has a thread per CUDA device,
  // so that one thread can keep several devices busy; here kernels run in another process anyway, a worker
  // has one device, and handing each pass over and back costs more than a small model's launches.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  thread_local Owner owner;
  auto fresh = std::make_unique<ThreadState>();
  ThreadState* const state = detail::thread_state_pointer = fresh.get();
  if (owner.ended) {
    (void)fresh.release();
  } else {
    owner.state = std::move(fresh);
  }
  return *state;
}

}  // namespace understudy::client
