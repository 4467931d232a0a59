#include "proxy_server/csrc/settings.h"

#include <ATen/ATen.h>
#include <c10/core/AllocatorConfig.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "replay/csrc/log/log_map.h"
#include "replay/csrc/settings/kernel_environment.h"
#include "replay/csrc/settings/torch_settings.h"

namespace understudy::server {
namespace {

using replay::LogError;
using replay::ManifestSetting;
using replay::Setting;
using replay::SettingRow;
using Values = std::array<uint64_t, replay::kSettings>;

std::atomic<Exact> exactness{Exact::kOff};

bool only_exact() { return exactness.load() != Exact::kOff; }

// What makes libraries exact: cuBLAS has one workspace for each stream, NCCL adds in the order of its ring or
// tree and not in that of switches.
constexpr std::string_view kOfExact[] = {"CUBLAS_WORKSPACE_CONFIG=:4096:8", "NCCL_ALGO=^NVLS"};
enum Deterministic : uint64_t { kAny = 0, kStrict = 1, kWarnOnly = 2 };

size_t number_of(const SettingRow& row) { return static_cast<size_t>(row.setting); }

const SettingRow& row_of(uint64_t setting, uint64_t value) {
  for (const SettingRow& row : replay::torch_settings())
    if (number_of(row) == setting) {
      if (value > row.most)
        throw LogError("setting " + std::to_string(setting) + " cannot be " + std::to_string(value));
      return row;
    }
  throw LogError("unknown setting " + std::to_string(setting));
}

// What the process had before its first session.
const Values& pristine() {
  static const Values values = [] {
    Values found{};
    for (const SettingRow& row : replay::torch_settings())
      found[number_of(row)] = replay::value_of(row).value_or(0);
    return found;
  }();
  return values;
}

void put(const SettingRow& row, uint64_t value) {
  if (row.setting == Setting::kFlushDenormal) {
// Every thread has a register of its own. Those of the pool took theirs from whoever began it.
#pragma omp parallel
    row.set(value);
  } else if (row.scope == replay::Scope::kThread || replay::value_of(row) != value) {
    row.set(value);  // some warn, or refuse, where this PyTorch has no use for them
  }
}

void unset(std::string_view entry) { ::unsetenv(std::string(entry.substr(0, entry.find('='))).c_str()); }

// Leaves alone what is so already: other threads may be looking.
void put_environment(const std::vector<std::string>& entries) {
  const std::vector<std::string> now = replay::kernel_environment();
  for (const std::string& entry : now)
    if (std::find(entries.begin(), entries.end(), entry) == entries.end()) unset(entry);
  for (const std::string& entry : entries) {
    if (std::find(now.begin(), now.end(), entry) != now.end()) continue;
    const size_t equals = entry.find('=');
    ::setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
  }
}

}  // namespace

void set_exact(Exact exact) { exactness = exact; }

OnlyExact::OnlyExact() : changed_(only_exact() && at::globalContext().deterministicAlgorithmsWarnOnly()) {
  if (changed_) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}
OnlyExact::~OnlyExact() {
  if (changed_) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
}

// What the script has chosen, but for what would give other bits each time.
uint64_t Settings::effective(Setting setting) const {
  const auto value = [this](Setting of) { return values_[static_cast<size_t>(of)]; };
  if (!only_exact()) return value(setting);
  if (setting == Setting::kDeterministic && value(setting) == kAny) return kWarnOnly;
  if (setting == Setting::kFillUninitialized && value(Setting::kDeterministic) == kAny) return 0;
  if (setting == Setting::kCudnnBenchmark) return 0;  // it takes what happens to be fastest today
  return value(setting);
}

std::vector<std::string> Settings::effective_environment() const {
  std::vector<std::string> entries = environment_;
  const auto of = [](std::string_view entry) {
    return [name = entry.substr(0, entry.find('=') + 1)](const std::string& one) {
      return std::string_view(one).substr(0, name.size()) == name;
    };
  };
  if (exactness.load() == Exact::kStrict)
    for (const std::string_view entry : replay::kStrictNccl) {  // proxyd has refused a script with others
      std::erase_if(entries, of(entry));
      entries.emplace_back(entry);
    }
  if (only_exact())
    for (const std::string_view entry : kOfExact)
      if (std::none_of(entries.begin(), entries.end(), of(entry))) entries.emplace_back(entry);
  return entries;
}

Settings::Settings(int threads) : threads_(threads) { reset(); }

void Settings::reset() {
  values_ = pristine();
  if (threads_ > 0) values_[static_cast<size_t>(Setting::kThreads)] = static_cast<uint64_t>(threads_);
  environment_.clear();
  launches_block_ = false;
  stream_ = 0;
}

void Settings::load(const std::vector<ManifestSetting>& rows) {
  reset();
  std::string environment;
  for (const ManifestSetting& row : rows) {
    if (row.setting == replay::kEnvironmentText)
      environment.append(reinterpret_cast<const char*>(&row.value), sizeof row.value);
    else if (row.setting == replay::kCurrentStream)
      stream_ = row.value;
    else
      values_[number_of(row_of(row.setting, row.value))] = row.value;
  }
  environment_ = replay::read_environment(environment);
  launches_block_ = variable(replay::kLaunchBlocking) == "1";
}

std::vector<ManifestSetting> Settings::manifest() const {
  std::vector<ManifestSetting> rows;
  for (size_t i = 0; i < values_.size(); i++) rows.push_back({i, values_[i]});
  if (stream_ != 0) rows.push_back({replay::kCurrentStream, stream_});
  const std::string text = replay::environment_text(environment_);
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    rows.push_back({replay::kEnvironmentText, 0});
    std::memcpy(&rows.back().value, text.data() + at, sizeof(uint64_t));
  }
  return rows;
}

void Settings::apply() const {
  put_environment(effective_environment());
  try {
    set_allocator();
  } catch (const c10::Error&) {  // its record has told that it is refused
  }
  for (const SettingRow& row : replay::torch_settings()) put(row, effective(row.setting));
}

void Settings::apply(Setting setting) const {
  const uint64_t value = effective(setting);
  put(row_of(static_cast<uint64_t>(setting), value), value);
}

void Settings::set_environment(std::string_view text) {
  environment_ = replay::read_environment(text);
  launches_block_ = variable(replay::kLaunchBlocking) == "1";
  put_environment(effective_environment());
  set_allocator();
}

// Its value in the script's environment, empty if it has none.
std::string_view Settings::variable(std::string_view name) const {
  for (const std::string_view entry : environment_)
    if (entry.substr(0, name.size()) == name && entry.size() > name.size() && entry[name.size()] == '=')
      return entry.substr(name.size() + 1);
  return {};
}

// A GPU's allocator has read proxyd's when it began. Throws c10::Error for what it does not know.
void Settings::set_allocator() const {
  std::string wanted(variable(replay::kAllocator));
  if (wanted.empty()) wanted = variable(replay::kAllocatorOfCuda);
  if (wanted.empty() || wanted == allocator_ || !at::globalContext().hasCUDA()) return;
  allocator_ = wanted;
  c10::CachingAllocator::setAllocatorSettings(wanted);
}

void Settings::set(Setting setting, uint64_t value) {
  const SettingRow& row = row_of(static_cast<uint64_t>(setting), value);
  values_[number_of(row)] = value;
  put(row, effective(setting));
  if (setting == Setting::kDeterministic) apply(Setting::kFillUninitialized);
}

}  // namespace understudy::server
