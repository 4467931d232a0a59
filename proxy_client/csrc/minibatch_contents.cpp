#include "proxy_client/csrc/minibatch_contents.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "replay/csrc/digest/digest.h"

namespace understudy::client {
namespace {

struct Contents {
  std::atomic<bool> kept{false};
  std::mutex mutex;  // innermost: taken while the log is locked, and by Python without it
  uint64_t payloads = 0, bytes = 0;
  replay::StreamedDigest digest;
  std::vector<MinibatchContent> ended;

  MinibatchContent open() const { return {payloads, bytes, digest.value()}; }
};

Contents& contents() {
  static Contents instance;
  return instance;
}

}  // namespace

void keep_minibatch_contents() noexcept { contents().kept.store(true, std::memory_order_relaxed); }

void add_to_minibatch(const void* data, size_t bytes, bool begins_payload) {
  Contents& c = contents();
  if (!c.kept.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.payloads += begins_payload;
  c.bytes += bytes;
  c.digest.add(data, bytes);
}

void end_minibatch() {
  Contents& c = contents();
  if (!c.kept.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.ended.push_back(c.open());
  c.payloads = c.bytes = 0;
  c.digest = replay::StreamedDigest();
}

std::vector<MinibatchContent> take_minibatch_contents() {
  Contents& c = contents();
  const std::lock_guard<std::mutex> lock(c.mutex);
  return std::exchange(c.ended, {});
}

MinibatchContent open_minibatch_content() {
  Contents& c = contents();
  const std::lock_guard<std::mutex> lock(c.mutex);
  return c.open();
}

}  // namespace understudy::client
