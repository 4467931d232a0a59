// PyTorch's settings in a device server: a session has a value for each from its beginning, they are part of
// every manifest, and they hold on the executor's thread, whoever says so.
#pragma once
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "replay/csrc/log/log_format.h"

namespace understudy::server {

// Of this process: sessions take only kernels that give the same bits each time, whatever the script says.
// For GPUs, on which many add in any order unless told otherwise; on the CPU none does. Strictly: NCCL also
// reduces in one way wherever its ranks are.
enum class Exact { kOff, kOn, kStrict };
void set_exact(Exact exact);

// For gradients of fused attention, which are exact only where what cannot be exact is refused.
class OnlyExact {
 public:
  OnlyExact();
  ~OnlyExact();
  OnlyExact(const OnlyExact&) = delete;
  OnlyExact& operator=(const OnlyExact&) = delete;

 private:
  const bool changed_;
};

class Settings {
 public:
  // `threads`: of one operator, until the log says otherwise; 0: as the process has it.
  explicit Settings(int threads);

  // As a session begins. Takes effect with apply(), as does load().
  void reset();
  void load(const std::vector<replay::ManifestSetting>& rows);
  // On which records lie; the settings are only where it is kept.
  uint64_t stream() const { return stream_; }
  void set_stream(uint64_t stream) { stream_ = stream; }
  std::vector<replay::ManifestSetting> manifest() const;

  // On the executor's thread, of which two of them are.
  void apply() const;
  void set(replay::Setting setting, uint64_t value);
  // Of the variables that are for the device (kernel_environment.h): the process has these then, and no
  // others. Libraries look once, so it comes before the session's first kernel.
  void set_environment(std::string_view text);
  // CUDA_LAUNCH_BLOCKING: the driver has read its own when it began.
  bool launches_block() const { return launches_block_; }
  // Puts back what a validation changed.
  void apply(replay::Setting setting) const;

 private:
  uint64_t effective(replay::Setting setting) const;
  std::vector<std::string> effective_environment() const;
  std::string_view variable(std::string_view name) const;
  void set_allocator() const;

  const int threads_;
  std::array<uint64_t, replay::kSettings> values_{};
  std::vector<std::string> environment_;
  mutable std::string allocator_;  // what its settings were made
  bool launches_block_ = false;
  uint64_t stream_ = 0;
};

}  // namespace understudy::server
