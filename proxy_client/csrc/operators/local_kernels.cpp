#include "proxy_client/csrc/operators/local_kernels.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>

#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/streams.h"
#include "proxy_client/csrc/device/virtual_memory.h"

namespace understudy::client {
namespace {

using at::IntArrayRef;
using at::Tensor;

c10::Device device_or_current(const OptionalDevice& device) {
  return resolve_device(device ? *device : c10::Device(c10::kCUDA));
}

void check_strided(const OptionalLayout& layout, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "tensors of layout ", *layout,
                              " are not supported on the virtual device");
}

// What nobody wrote reads as NaN, where the script asked for that.
bool fills_uninitialized() {
  const at::Context& context = at::globalContext();
  return C10_UNLIKELY(context.deterministicAlgorithms()) && context.deterministicFillUninitializedMemory();
}
Tensor filled(Tensor fresh) {
  if (fills_uninitialized()) at::native::fill_empty_deterministic_(fresh);
  return fresh;
}

}  // namespace

Tensor empty_memory_format(IntArrayRef size, OptionalDtype dtype, OptionalLayout layout,
                           OptionalDevice device, std::optional<bool> pinned, OptionalFormat format) {
  check_strided(layout, pinned);
  const DeviceScope scope(device_or_current(device).index());
  return filled(
      at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, OptionalDtype dtype, OptionalLayout layout,
                     OptionalDevice device, std::optional<bool> pinned) {
  check_strided(layout, pinned);
  const DeviceScope scope(device_or_current(device).index());
  return filled(at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                                  c10::dtype_or_default(dtype)));
}

Tensor efficient_zero_tensor(IntArrayRef size, OptionalDtype dtype, OptionalLayout layout,
                             OptionalDevice device, std::optional<bool> pinned) {
  check_strided(layout, pinned);
  // Without memory: what is computed with it leaves it out, where adding zeros would lose the sign of one.
  at::native::ZeroTensorAllocator allocator(device_or_current(device));
  return at::detail::empty_generic(size, &allocator,
                                   kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, OptionalFormat format) {
  if (self.sizes() == size && !format) return self;
  c10::DimVector strides = c10::contiguous_strides(size);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve)
    strides = c10::DimVector(
        at::empty(size, at::TensorOptions().device(at::kMeta).memory_format(*format)).strides());
  const auto bytes_before = static_cast<int64_t>(self.storage().nbytes());
  resize_tensor(self, size, strides, /*record=*/true);
  if (fills_uninitialized()) at::native::fill_resize_deterministic_(self, bytes_before);
  return self;
}

void resize_untyped_storage(const Tensor& view_of_storage, int64_t bytes) {
  c10::StorageImpl& storage = *view_of_storage.storage().unsafeGetStorageImpl();
  TORCH_CHECK(bytes >= 0, "a storage cannot have ", bytes, " bytes");
  if (storage.nbytes() != static_cast<size_t>(bytes))
    resize_storage(storage, static_cast<size_t>(bytes), /*record=*/true);
}

Tensor& set_storage_with_offset(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                                IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const c10::DimVector contiguous = c10::contiguous_strides(size);
  const bool given = stride.data() != nullptr && stride.size() == size.size();
  impl->set_sizes_and_strides(size, given ? stride : IntArrayRef(contiguous), offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_with_offset(self, std::move(source), 0, {items}, {});
}

Tensor& set_empty(Tensor& self) {
  return set_storage_with_offset(self, allocate_storage(0, self.device().index()), 0, {0}, {});
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
Tensor view_as_real(const Tensor& self) { return at::native::view_as_real(self); }
Tensor view_as_complex(const Tensor& self) { return at::native::view_as_complex(self); }
void record_stream(Tensor& self, at::Stream stream) {
  if (streams_in_use()) use_in_stream(locate(self).handle, stream);
}

}  // namespace understudy::client
