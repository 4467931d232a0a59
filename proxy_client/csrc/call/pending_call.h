// A call on its way, between the halves of operator_call.cpp (the steady state) and first_call.cpp (what
// happens once per template, and what must ask the device server).
#pragma once
#include <c10/util/SmallVector.h>

#include "proxy_client/csrc/call/thread_state.h"
#include "proxy_client/csrc/shapes/shape_cache.h"
#include "proxy_client/csrc/statistics.h"

namespace understudy::client {

using Results = c10::SmallVector<c10::IValue, 4>;

struct PendingCall {
  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  c10::ArrayRef<c10::IValue> arguments;
  c10::DeviceIndex device;
  LogWriter& log;
  ThreadState& thread;
  const Encoding& encoding;
  StageTimer& timer;
};

// The record of a call whose fresh results get handles from `first_handle` on.
inline void append_operator(LogWriter& log, const CallTemplate& entry, const WordBuffer& values,
                            uint64_t first_handle) {
  const auto fill = [&](uint64_t* body) {
    std::memcpy(body, values.data(), 8 * values.size());
    for (size_t i = 0; i < entry.fresh; i++) body[values.size() + i] = first_handle + i;
  };
  send_with_template(
      log, entry, [&](uint64_t id) { append(log, Kind::kOperator, id, values.size() + entry.fresh, fill); });
}

// Appends a call whose results the template describes.
void run_async(const PendingCall& call, const CallTemplate& entry, Results& results);
// Appends a call whose results only the device server knows, and waits for them.
void run_sync(const PendingCall& call, const CallTemplate& entry, Results& results);
// A call that has no template yet.
void run_first(const PendingCall& call, Results& results);

}  // namespace understudy::client
