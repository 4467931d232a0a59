// What a thread keeps from call to call, so that a call in steady state allocates nothing and takes no lock
// but the log's.
#pragma once
#include <array>

#include "proxy_client/csrc/call/call_encoding.h"
#include "proxy_client/csrc/operators/operator_info.h"
#include "proxy_client/csrc/shapes/shape_cache.h"

namespace understudy::client {

// The operators that a thread has called: one look where no two share a slot.
class OperatorTable {
 public:
  const OperatorInfo& find(const c10::OperatorHandle& op) {
    const void* const schema = &op.schema();
    Slot& slot = slots_[(reinterpret_cast<uintptr_t>(schema) * kOdd) >> kShift];
    if (C10_UNLIKELY(slot.schema != schema)) slot = {schema, &operator_info(op)};
    return *slot.info;
  }

 private:
  struct Slot {
    const void* schema = nullptr;
    const OperatorInfo* info = nullptr;
  };
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  static constexpr int kBits = 10, kShift = 64 - kBits;
  std::array<Slot, size_t{1} << kBits> slots_{};
};

struct ThreadState {
  OperatorTable operators;
  TemplateTable templates;
  Encoding encoding;
  bool encoding_lent = false;
};

ThreadState& make_thread_state();

namespace detail {
// Initial-exec: one instruction, where a library opened at run time would call __tls_get_addr.
[[gnu::tls_model("initial-exec")]] extern thread_local ThreadState* thread_state_pointer;
}  // namespace detail

inline ThreadState& thread_state() {
  ThreadState* const known = detail::thread_state_pointer;
  return C10_LIKELY(known != nullptr) ? *known : make_thread_state();
}

// Lends the calling thread's encoding; a call within a call gets one of its own.
class EncodingLease {
 public:
  explicit EncodingLease(ThreadState& thread) : thread_(thread) {
    if (C10_UNLIKELY(thread.encoding_lent)) {
      own_ = std::make_unique<Encoding>();
    } else {
      thread.encoding_lent = true;
    }
  }
  ~EncodingLease() {
    if (C10_LIKELY(!own_)) thread_.encoding_lent = false;
  }
  EncodingLease(const EncodingLease&) = delete;
  EncodingLease& operator=(const EncodingLease&) = delete;
  Encoding& operator*() { return own_ ? *own_ : thread_.encoding; }

 private:
  ThreadState& thread_;
  std::unique_ptr<Encoding> own_;
};

}  // namespace understudy::client
