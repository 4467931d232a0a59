// Random number generators of the device: the worker holds a seed and a handle, the state lives in the
// server.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <mutex>
#include <variant>
#include <vector>

#include "proxy_client/csrc/session.h"

namespace understudy::client {

// Until the device has a session, a generator keeps what was last asked of it (a seed or a state) and tells
// the server when it is first used: seeding must not open sessions.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(c10::DeviceIndex device, uint64_t handle);
  ~DeviceGenerator() override;

  // Its handle in records; the server knows it from now on. 0 is the default generator of the session's
  // device.
  uint64_t announce(LogWriter& log);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return c10::kCUDA; }

 private:
  using State = std::vector<uint8_t>;
  DeviceGenerator* clone_impl() const override;
  LogWriter* session_log() const;  // of its own device, null if that has none
  void send(LogWriter& log) const;
  State state_bytes() const;
  void restore(State state);

  mutable std::mutex mutex_;
  const uint64_t handle_;
  uint64_t seed_;
  std::variant<uint64_t, State> pending_;  // a seed or a state
  bool announced_ = false;
};

// The default generator of a device; -1 is the current device.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
DeviceGenerator& as_device_generator(const at::Generator& generator);
// To be called when a session opens.
void send_default_generator(LogWriter& log, c10::DeviceIndex device);

}  // namespace understudy::client
