#include "proxy_server/csrc/driver/device_trial.h"

#include <ATen/ATen.h>

namespace understudy::server {

void try_device(c10::Device device) {
  constexpr int64_t kNumbers = 256 << 10;  // 1 MiB: a wave of blocks for every processor of a large GPU
  if (!device.is_cpu()) at::globalContext().lazyInitDevice(device.type());
  const at::Tensor numbers = at::arange(kNumbers, at::kInt);
  const auto computed = [](const at::Tensor& from) { return from.mul(3).add(1); };
  const at::Tensor found = computed(numbers.to(device)).cpu();
  TORCH_CHECK(found.equal(computed(numbers)), "it computes ", found.ne(computed(numbers)).sum().item(),
              " of ", kNumbers, " numbers wrongly");
}

}  // namespace understudy::server
