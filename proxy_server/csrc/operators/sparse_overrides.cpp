// Sparse kernels of the CPU that do not do for a device server as they are.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include <tuple>

namespace understudy::server {
namespace {

using at::Tensor;

class SilentWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

bool picks_elements(c10::string_view reduce) { return reduce == "amax" || reduce == "amin"; }

// The kernel notes which elements it picked only if somebody will ask for gradients. Those are computed in
// the worker's graph, of which nothing is known here: note them always.
std::tuple<Tensor, Tensor> mm_reduce(const Tensor& self, const Tensor& other, c10::string_view reduce) {
  const Tensor noting = picks_elements(reduce) ? self.detach().set_requires_grad(true) : self;
  const c10::AutoGradMode with_gradients(true);
  return at::native::_sparse_mm_reduce_impl_sparse_csr_cpu(noting, other, reduce);
}

// The kernel takes the positions of picked elements on trust.
std::tuple<Tensor, Tensor> mm_reduce_backward(const Tensor& self, const Tensor& grad_out,
                                              const Tensor& weight, c10::string_view reduce,
                                              const Tensor& picked, std::array<bool, 2> wanted) {
  if (picks_elements(reduce)) {
    const int64_t elements = self._nnz();
    TORCH_CHECK(
        picked.sizes() == grad_out.sizes() && picked.scalar_type() == self.crow_indices().scalar_type(),
        "positions of shape ", picked.sizes(), " do not fit gradients of shape ", grad_out.sizes());
    if (picked.numel() != 0) {
      const auto [least, most] = at::aminmax(picked);
      TORCH_CHECK_INDEX(least.item<int64_t>() >= 0 && most.item<int64_t>() <= elements,
                        "a position lies outside the ", elements, " elements of a sparse tensor");
    }
  }
  return at::native::_sparse_mm_reduce_impl_backward_sparse_csr_cpu(self, grad_out, weight, reduce, picked,
                                                                    wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparseCsrCPU, library) {
  SilentWarnings silent;  // that these kernels replace others
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  library.impl("_sparse_mm_reduce_impl", TORCH_FN(mm_reduce));
  library.impl("_sparse_mm_reduce_impl_backward", TORCH_FN(mm_reduce_backward));
}

}  // namespace understudy::server
