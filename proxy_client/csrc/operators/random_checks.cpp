#include "proxy_client/csrc/operators/random_checks.h"

#include <ATen/native/DistributionTemplates.h>

#include "proxy_client/csrc/call/direct_call.h"

namespace understudy::client {
namespace {

using at::Tensor;
using OptionalGenerator = std::optional<at::Generator>;
namespace templates = at::native::templates;

// In the place of the kernel: PyTorch's templates check, and then nothing is drawn.
template <class Generator>
struct NoDraw {
  template <class... Arguments>
  void operator()(const Arguments&...) const {}
};

}  // namespace

Tensor& cauchy_(Tensor& self, double median, double sigma, OptionalGenerator generator) {
  templates::cauchy_impl_<NoDraw, at::Generator>(self, median, sigma, generator);
  return Direct<at::_ops::cauchy_>::call(self, median, sigma, std::move(generator));
}

Tensor& exponential_(Tensor& self, double lambd, OptionalGenerator generator) {
  templates::exponential_impl_<NoDraw, at::Generator>(self, lambd, generator);
  return Direct<at::_ops::exponential_>::call(self, lambd, std::move(generator));
}

Tensor& geometric_(Tensor& self, double p, OptionalGenerator generator) {
  templates::geometric_impl_<NoDraw, at::Generator>(self, p, generator);
  return Direct<at::_ops::geometric_>::call(self, p, std::move(generator));
}

Tensor& log_normal_(Tensor& self, double mean, double std, OptionalGenerator generator) {
  templates::log_normal_impl_<NoDraw, at::Generator>(self, mean, std, generator);
  return Direct<at::_ops::log_normal_>::call(self, mean, std, std::move(generator));
}

Tensor& normal_(Tensor& self, double mean, double std, OptionalGenerator generator) {
  templates::normal_impl_<NoDraw, at::Generator>(self, mean, std, generator);
  return Direct<at::_ops::normal_>::call(self, mean, std, std::move(generator));
}

Tensor& uniform_(Tensor& self, double from, double to, OptionalGenerator generator) {
  templates::uniform_impl_<NoDraw, at::Generator>(self, from, to, generator);
  return Direct<at::_ops::uniform_>::call(self, from, to, std::move(generator));
}

}  // namespace understudy::client
