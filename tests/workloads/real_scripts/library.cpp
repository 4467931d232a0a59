// Operators of a script's own, written in C++ for the CPU's memory: the device server loads this library,
// too.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace {

// x * factor + 1, element by element, on raw memory: it cannot run where there is only a virtual address.
at::Tensor scale(const at::Tensor& x, double factor) {
  const at::Tensor dense = x.contiguous();
  at::Tensor out = at::empty_like(dense);
  const float* from = dense.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < dense.numel(); i++) to[i] = from[i] * static_cast<float>(factor) + 1.0f;
  return out;
}

at::Tensor& add_one_(at::Tensor& x) {
  float* data = x.mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i++) data[i] += 1.0f;
  return x;
}

// How long the result is depends on the values, which nothing but the kernel knows.
at::Tensor keep_positive(const at::Tensor& x) { return x.masked_select(x.gt(0)); }

// Of two results one is a number.
std::tuple<at::Tensor, int64_t> positives(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  int64_t count = 0;
  for (int64_t i = 0; i < dense.numel(); i++) count += dense.const_data_ptr<float>()[i] > 0;
  return {scale(dense, 2.0), count};
}

}  // namespace

TORCH_LIBRARY(understudy_test, library) {
  library.def("scale(Tensor x, float factor) -> Tensor");
  library.def("add_one_(Tensor(a!) x) -> Tensor(a!)");
  library.def("keep_positive(Tensor x) -> Tensor");
  library.def("positives(Tensor x) -> (Tensor, int)");
}

TORCH_LIBRARY_IMPL(understudy_test, CPU, library) {
  library.impl("scale", &scale);
  library.impl("add_one_", &add_one_);
  library.impl("keep_positive", &keep_positive);
  library.impl("positives", &positives);
}
