// What each minibatch has brought to the device: a digest of its host-to-device payloads, in the log's order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace understudy::client {

// Of one minibatch. A copy is one payload, however many records it takes.
struct MinibatchContent {
  uint64_t payloads = 0, bytes = 0;
  uint64_t digest = 0;  // XXH3-64 (replay/csrc/digest/digest.h) of all payloads, one behind the other
};

// From now on contents are kept; until then nothing below does anything.
void keep_minibatch_contents() noexcept;

// A piece of a payload that was written into the log, the first one of it or not, and the end of a minibatch.
// Both are called while the log is locked for the record that they belong to: so their order is the log's.
void add_to_minibatch(const void* data, size_t bytes, bool begins_payload);
void end_minibatch();

// Those that have ended since the last call, oldest first.
std::vector<MinibatchContent> take_minibatch_contents();
// The one that has not ended yet.
MinibatchContent open_minibatch_content();

}  // namespace understudy::client
