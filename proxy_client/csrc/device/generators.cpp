#include "proxy_client/csrc/device/generators.h"

#include <ATen/ATen.h>

#include "proxy_client/csrc/device/device.h"

namespace understudy::client {
namespace {

constexpr uint64_t kDefaultGenerator = 0;
constexpr uint64_t kFirstOwnGenerator = 16;
std::atomic<uint64_t> next_generator{kFirstOwnGenerator};

at::Tensor as_tensor(const std::vector<uint8_t>& bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::vector<uint8_t> as_bytes(const c10::TensorImpl& tensor) {
  const auto* data = static_cast<const uint8_t*>(tensor.data());
  return {data, data + tensor.numel() * static_cast<int64_t>(tensor.itemsize())};
}

// As CUDA shows it: the seed, and an offset that counts what was drawn.
constexpr size_t kSeedBytes = sizeof(uint64_t), kStateBytes = 2 * sizeof(uint64_t);

std::vector<uint8_t> state_of(uint64_t seed, uint64_t offset) {
  std::vector<uint8_t> state(kStateBytes);
  std::memcpy(state.data(), &seed, kSeedBytes);
  std::memcpy(state.data() + kSeedBytes, &offset, sizeof offset);
  return state;
}

}  // namespace

DeviceGenerator::DeviceGenerator(c10::DeviceIndex device, uint64_t handle)
    : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
      handle_(handle),
      seed_(c10::default_rng_seed_val),
      pending_(seed_) {}

DeviceGenerator::~DeviceGenerator() {
  if (!announced_ || handle_ == kDefaultGenerator) return;
  try {
    if (LogWriter* log = log_if_open()) append(*log, Kind::kGeneratorFree, handle_);
  } catch (const std::exception&) {
    // The session is lost; the next call says so.
  }
}

LogWriter* DeviceGenerator::session_log() const {
  LogWriter* log = log_if_open();
  return log && bound_device() == device_.index() ? log : nullptr;
}

void DeviceGenerator::send(LogWriter& log) const {
  if (const auto* seed = std::get_if<uint64_t>(&pending_)) {
    append_word(log, Kind::kSeed, handle_, *seed);
    return;
  }
  const State& state = std::get<State>(pending_);
  append(log, Kind::kGeneratorSet, handle_, 1 + (state.size() + 7) / 8, [&](uint64_t* body) {
    body[0] = state.size();
    body[(state.size() + 7) / 8] = 0;
    std::memcpy(body + 1, state.data(), state.size());
  });
}

uint64_t DeviceGenerator::announce(LogWriter& log) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!announced_) {
    send(log);
    announced_ = true;
  }
  return handle_;
}

void DeviceGenerator::set_current_seed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  seed_ = seed;
  pending_ = seed;
  if (LogWriter* log = session_log()) {
    send(*log);
    announced_ = true;
  }
}

uint64_t DeviceGenerator::current_seed() const { return seed_; }

uint64_t DeviceGenerator::seed() {
  const uint64_t seed = c10::detail::getNonDeterministicRandom();
  set_current_seed(seed);
  return seed;
}

void DeviceGenerator::set_offset(uint64_t offset) { restore(state_of(seed_, offset)); }

uint64_t DeviceGenerator::get_offset() const {
  uint64_t offset;
  std::memcpy(&offset, state_bytes().data() + kSeedBytes, sizeof offset);
  return offset;
}

void DeviceGenerator::restore(State state) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::memcpy(&seed_, state.data(), kSeedBytes);
  pending_ = std::move(state);
  if (LogWriter* log = session_log()) {
    send(*log);
    announced_ = true;
  }
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == static_cast<int64_t>(kStateBytes), "RNG state is wrong size");
  restore(as_bytes(state));
}

DeviceGenerator::State DeviceGenerator::state_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  LogWriter* log = announced_ ? session_log() : nullptr;
  if (!log) {
    const auto* seed = std::get_if<uint64_t>(&pending_);
    return seed ? state_of(*seed, 0) : std::get<State>(pending_);
  }
  State state;
  call(
      *log, Kind::kGeneratorGet, handle_, 0, [](uint64_t*) {},
      [&](const uint8_t* payload, size_t bytes) { state.assign(payload, payload + bytes); });
  return state;
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  return as_tensor(state_bytes()).getIntrusivePtr();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto copy = c10::make_intrusive<DeviceGenerator>(device_.index(), next_generator++);
  copy->restore(state_bytes());
  return copy.release();
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (c10::DeviceIndex i = 0; i < device_count(); i++)
      all.push_back(at::make_generator<DeviceGenerator>(i, kDefaultGenerator));
    return all;
  }();
  return generators[static_cast<size_t>(device < 0 ? current_device()
                                                   : resolve_device({c10::kCUDA, device}).index())];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device, next_generator++);
}

DeviceGenerator& as_device_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return *static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
}

void send_default_generator(LogWriter& log, c10::DeviceIndex device) {
  as_device_generator(default_generator(device)).announce(log);
}

}  // namespace understudy::client
