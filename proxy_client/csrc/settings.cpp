#include "proxy_client/csrc/settings.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "proxy_client/csrc/session.h"
#include "replay/csrc/settings/kernel_environment.h"
#include "replay/csrc/settings/torch_settings.h"

namespace understudy::client {
namespace {

using replay::kSettings;
using replay::Scope;
using replay::Setting;
using Values = std::array<std::optional<uint64_t>, kSettings>;

constexpr uint64_t kStates = 1 << 16;

struct Settings {
  std::mutex mutex;  // also keeps records in the order of what they say
  Values values;     // by number; of a thread's: once the script has set it
  std::map<Values, uint64_t> states;
};

Settings& settings() {
  static Settings& instance = *std::make_unique<Settings>().release();  // as session()
  return instance;
}

void send(LogWriter& log, size_t number, uint64_t value) { append_word(log, Kind::kSetting, number, value); }

// Reads what PyTorch has; `changed(number, value)` for each that is another one than before.
template <class Changed>
void read(Settings& s, Changed&& changed) {
  for (const replay::SettingRow& row : replay::torch_settings()) {
    if (row.scope == Scope::kThread) continue;
    const auto number = static_cast<size_t>(row.setting);
    const auto value = replay::value_of(row);
    if (!value || s.values[number] == value) continue;
    s.values[number] = value;
    changed(number, *value);
  }
  Values of_process = s.values;
  for (const replay::SettingRow& row : replay::torch_settings())
    if (row.scope == Scope::kThread) of_process[static_cast<size_t>(row.setting)] = std::nullopt;
  const auto [state, fresh] = s.states.emplace(of_process, s.states.size());
  TORCH_CHECK(state->second < kStates, "this process has set PyTorch's settings in ", kStates,
              " different ways, more than understudy tells apart");
  detail::settings_state.store(state->second, std::memory_order_relaxed);
}

}  // namespace

namespace detail {
std::atomic<uint64_t> settings_state{0};
}

void settings_changed() {
  Settings& s = settings();
  std::lock_guard<std::mutex> lock(s.mutex);
  LogWriter* const log = log_if_open();
  read(s, [&](size_t number, uint64_t value) {
    if (log) send(*log, number, value);
  });
}

void set_of_thread(Setting setting, uint64_t value) {
  const auto number = static_cast<size_t>(setting);
  TORCH_CHECK(number < kSettings, "there is no setting ", number);
  Settings& s = settings();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.values[number] = value;
  if (LogWriter* log = log_if_open()) send(*log, number, value);
}

std::vector<std::optional<uint64_t>> known_settings() {
  Settings& s = settings();
  std::lock_guard<std::mutex> lock(s.mutex);
  return {s.values.begin(), s.values.end()};
}

void send_settings(LogWriter& log) {
  if (const std::string text = replay::environment_text(replay::kernel_environment()); !text.empty())
    append(log, Kind::kEnvironment, 0, 1 + text.size() / 8, [&](uint64_t* body) {
      body[0] = text.size();
      std::memcpy(body + 1, text.data(), text.size());
    });
  Settings& s = settings();
  std::lock_guard<std::mutex> lock(s.mutex);
  read(s, [](size_t, uint64_t) {});
  for (const replay::SettingRow& row : replay::torch_settings()) {
    const auto number = static_cast<size_t>(row.setting);
    if (s.values[number]) send(log, number, *s.values[number]);
  }
}

}  // namespace understudy::client
