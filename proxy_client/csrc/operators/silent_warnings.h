// For registrations that PyTorch would warn of: ours replace kernels on purpose.
#pragma once
#include <c10/util/Exception.h>

namespace understudy::client {

class SilentWarnings {
 private:
  class Nobody final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Nobody nobody_;
  c10::WarningUtils::WarningHandlerGuard guard_{&nobody_};
};

}  // namespace understudy::client
