// What records of the script's streams do to the state of a device server.
#include <algorithm>
#include <exception>
#include <string>

#include "proxy_server/csrc/state/device_state.h"

namespace understudy::server {

using replay::Kind;
using replay::LogError;

// Memory that was there before the stream was, or that a recovery has taken elsewhere than the script did: a
// script says of which memory it uses where (record_stream) only as far as its own streams took it.
void DeviceState::share_contents(c10::Stream stream) {
  for (auto& [handle, b] : table_.buffers())
    if (b.available) driver_.streams().use(b.content.storage(), stream);
}

void DeviceState::begin_running() {
  settings_.apply();
  ScriptStreams& streams = driver_.streams();
  if (streams.several()) streams.each([&](size_t, c10::Stream stream) { share_contents(stream); });
  streams.spread();
  streams.enter(settings_.stream());
}

// Whoever looks at the state meanwhile does so on the default stream.
void DeviceState::end_running() noexcept {
  try {
    driver_.streams().enter(0);
    driver_.streams().gather();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): who asks the device next is told
  }
}

void DeviceState::run_stream_record(Kind kind, uint64_t aux, Words words) {
  ScriptStreams& streams = driver_.streams();
  switch (kind) {
    case Kind::kStream:
      settings_.set_stream(aux);
      return streams.enter(aux);
    case Kind::kStreamMark: {
      const uint64_t stream = words.next(), communicator = words.next();
      if (communicator != 0) return streams.mark(aux, communicators_.newest(communicator));
      return streams.mark(aux, stream);
    }
    case Kind::kStreamWait: {
      const uint64_t stream = words.next();
      const ScriptStreams::Mark* const known = streams.find(aux);
      if (known == nullptr || known->event) return streams.wait(aux, stream);
      const Communicators::Works works = known->works;
      return streams.on(stream, [&] { communicators_.wait_for_works(works, table_); });
    }
    default: {
      const uint64_t stream = words.next();
      BufferTable::Buffer* const b = table_.find(aux);
      if (b != nullptr && b->available) streams.use(b->content.storage(), stream);
    }
  }
}

Communicators::Works Communicators::newest(uint64_t communicator) const {
  const auto known = communicators_.find(communicator);
  if (known == communicators_.end()) throw LogError("unknown communicator " + std::to_string(communicator));
  return known->second.newest;
}

void Communicators::forget_newest() {
  for (auto& [handle, c] : communicators_) c.newest.clear();
}

// Whoever has waited for one touches what it wrote; of calls of a group each has the same.
void Communicators::wait_for_works(const Works& works, BufferTable& table) {
  for (const auto& work : works) {
    const auto of_it = [&](const InFlight& f) { return f.work == work; };
    auto f = std::find_if(in_flight_.begin(), in_flight_.end(), of_it);
    if (f == in_flight_.end()) ask_backend([&] { work->wait(); });
    for (; f != in_flight_.end(); f = std::find_if(in_flight_.begin(), in_flight_.end(), of_it))
      finish(f, table, /*told=*/true);
  }
}

}  // namespace understudy::server
