// The worker's side of replay/csrc/settings/torch_settings.h: it keeps PyTorch's settings, the device server
// hears of them.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "replay/csrc/log/log_writer.h"

namespace understudy::client {

// To be called once a setter of PyTorch's has run: sends what it changed.
void settings_changed();

// A setting of the calling thread, which the device server takes for its executor's.
void set_of_thread(replay::Setting setting, uint64_t value);

// What the device server was told, or will be once there is a session: by number.
std::vector<std::optional<uint64_t>> known_settings();

// All of them: a log begins so.
void send_settings(replay::LogWriter& log);

namespace detail {
extern std::atomic<uint64_t> settings_state;
}

// A number below 65,536 for what the settings are together: results may be of another shape under others.
inline uint64_t settings_state() noexcept { return detail::settings_state.load(std::memory_order_relaxed); }

}  // namespace understudy::client
