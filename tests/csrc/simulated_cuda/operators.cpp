// What the simulated device does by itself: memory, copies, and views of it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/csrc/simulated_cuda/failures.h"
#include "tests/csrc/simulated_cuda/host_views.h"
#include "tests/csrc/simulated_cuda/launch.h"
#include "tests/csrc/simulated_cuda/runtime.h"
#include "tests/csrc/simulated_cuda/settings.h"

namespace understudy::simulated {
namespace {

constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::CUDA);

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), allocator(), kDevice,
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           allocator(), kDevice, c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(self.storage_offset()));
  return view;
}

// ---------------------------------------------------------------- copies
void take_the_time_of(uint64_t bytes) {
  if (const uint64_t ns = settings().copy_ns_per_kib * bytes / 1024; ns >= 1000)
    usleep(static_cast<useconds_t>(ns / 1000));
}

// From memory that is not pinned CUDA copies before it returns, and on from there when the stream has come to
// it.
void copy_to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool later = non_blocking && is_pinned(from.const_data_ptr());
  const at::Tensor source = later ? from : from.clone();
  counters().bytes_to_device += source.nbytes();
  Stream& stream = current_stream();
  const uint64_t number = stream.enqueue([to = host_view(to), source] {
    take_the_time_of(source.nbytes());
    to.copy_(source);
  });
  if (!non_blocking) synchronize(stream, number);
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  counters().bytes_to_host += from.nbytes();
  Stream& stream = current_stream();
  const uint64_t number = stream.enqueue([to, from = host_view(from)] {
    take_the_time_of(from.nbytes());
    to.copy_(from);
  });
  if (!(non_blocking && is_pinned(to.const_data_ptr()))) synchronize(stream, number);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  check(Place::kLaunch);
  const at::Tensor source = from.expand_as(self);
  if (self.numel() == 0) return self;
  if (!self.is_cuda()) {
    copy_to_host(self, source, non_blocking);
  } else if (!source.is_cuda()) {
    copy_to_device(self, source, non_blocking);
  } else {
    current_stream().enqueue([to = host_view(self), from = host_view(source)] { to.copy_(from); });
  }
  return self;
}

// As CUDA's own: one launch for all, where they lie on the device and look alike.
void foreach_copy_(at::TensorList self, at::TensorList from, bool non_blocking) {
  TORCH_CHECK(self.size() == from.size(), "Tensor lists must have the same number of tensors");
  bool at_once = true;
  for (size_t i = 0; i < self.size(); i++)
    at_once = at_once && self[i].is_cuda() && from[i].is_cuda() && self[i].sizes() == from[i].sizes();
  if (!at_once) {
    for (size_t i = 0; i < self.size(); i++) copy_(const_cast<at::Tensor&>(self[i]), from[i], non_blocking);
    return;
  }
  check(Place::kLaunch);
  counters().launches++;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < self.size(); i++) pairs.emplace_back(host_view(self[i]), host_view(from[i]));
  current_stream().enqueue([pairs = std::move(pairs)] {
    for (const auto& [to, source] : pairs) to.copy_(source);
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, from, non_blocking);
}

// ---------------------------------------------------------------- memory of a tensor
void grow(c10::StorageImpl& storage, uint64_t bytes) {
  const uint64_t before = storage.nbytes();
  if (bytes <= before) return;
  c10::DataPtr larger = allocator()->allocate(bytes);
  const Memory& here = memory(current_device());
  current_stream().enqueue(
      [to = here.for_kernels(larger.get()), from = here.for_kernels(storage.data()), before] {
        if (before != 0) std::memcpy(to, from, before);
      });
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

uint64_t bytes_for(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, size_t item) {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (static_cast<uint64_t>(last) + 1) * item;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (format) impl->empty_tensor_restride(*format);
  grow(*self.storage().unsafeGetStorageImpl(),
       bytes_for(self.sizes(), self.strides(), self.storage_offset(), self.element_size()));
  return self;
}

at::Tensor& set_(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                 c10::SymIntArrayRef strides) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const at::IntArrayRef plain = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.empty() && !plain.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(plain);
  } else {
    impl->set_sizes_and_strides(plain, C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  }
  grow(*self.storage().unsafeGetStorageImpl(),
       bytes_for(self.sizes(), self.strides(), self.storage_offset(), self.element_size()));
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

// Of the three ways to attend, the one that is made of other operators.
int64_t choice_of_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

// What has a kernel of its own for the CPU has one for CUDA, too: without it PyTorch would take what it makes
// of other operators, whose bits are others.
void register_those_of_the_cpu(torch::Library& m, const std::set<std::string>& own) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || own.count(toString(name)) != 0 || !op) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) m.impl(toString(name).c_str(), launched());
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(launched()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  std::set<std::string> own;
  const auto implement = [&](const char* name, auto function) {
    own.insert(std::string("aten::") + name);
    m.impl(name, function);
  };
  implement("empty.memory_format", TORCH_FN(empty));
  implement("empty_strided", TORCH_FN(empty_strided));
  implement("as_strided", TORCH_FN(as_strided));
  implement("copy_", TORCH_FN(copy_));
  implement("_copy_from", TORCH_FN(copy_from));
  implement("_foreach_copy_", TORCH_FN(foreach_copy_));
  implement("resize_", TORCH_FN(resize_));
  implement("set_.source_Storage_storage_offset", TORCH_FN(set_));
  implement("record_stream", TORCH_FN(record_stream));
  implement("_fused_sdp_choice", TORCH_FN(choice_of_attention));
  register_those_of_the_cpu(m, own);
  // PyTorch's own kernels, which choose a library by the device.
  for (const char* name : {"convolution", "convolution_backward"}) m.impl(name, launched());
}

}  // namespace
}  // namespace understudy::simulated
