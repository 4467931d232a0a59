#include "proxy_client/csrc/device/client_tensor.h"

#include <ATen/ATen.h>

#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "replay/csrc/log/log_format.h"

namespace understudy::client {

at::Tensor make_tensor(c10::Storage storage, const Layout& layout) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys,
                                                         c10::scalarTypeToTypeMeta(layout.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
  return tensor;
}

uint64_t lazy_flags(const at::Tensor& tensor) {
  return (tensor.is_conj() ? replay::kConjugate : 0) | (tensor.is_neg() ? replay::kNegative : 0);
}

void set_lazy_flags(const at::Tensor& tensor, uint64_t flags) {
  if (tensor.is_complex()) tensor._set_conj((flags & replay::kConjugate) != 0);
  tensor._set_neg((flags & replay::kNegative) != 0);
}

c10::Storage make_storage(size_t bytes, c10::DeviceIndex device, uint64_t handle) {
  return {c10::Storage::use_byte_size_t(), bytes, make_data_pointer(bytes, device, handle),
          device_allocator(), true};
}

c10::Storage allocate_storage(size_t bytes, c10::DeviceIndex device) {
  const DeviceScope scope(device);
  return {c10::Storage::use_byte_size_t(), bytes, device_allocator()->allocate(bytes), device_allocator(),
          true};
}

size_t bytes_needed(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, size_t item_bytes) {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return static_cast<size_t>(last + 1) * item_bytes;
}

void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, bool record) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t needed = bytes_needed(sizes, strides, impl->storage_offset(), impl->itemsize());
  c10::StorageImpl& storage = *impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage.nbytes()) resize_storage(storage, needed, record);
  impl->set_sizes_and_strides(sizes, strides);
}

ByteRange byte_range(const at::Tensor& dense) {
  const auto [handle, displacement] = locate(dense);
  const size_t item = dense.element_size();
  return {handle, displacement + static_cast<size_t>(dense.storage_offset()) * item,
          static_cast<size_t>(dense.numel()) * item};
}

}  // namespace understudy::client
