#include "proxy_client/csrc/thread_state.h"

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
