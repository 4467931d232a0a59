// Device memory as the worker sees it: addresses in a reserved range that nobody can touch.
//
// Host code that reads or writes device memory faults at once instead of seeing garbage. Each storage has a
// virtual handle, never reused; addresses are reused.
#pragma once
#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>

namespace understudy::client {

// One block of addresses, and whose it is now. Blocks are carved once and used again for ever.
struct Buffer {
  uint64_t handle = 0;  // 0: given up, its deleter frees nothing on the device
  char* address = nullptr;
  size_t bytes = 0;
  uint32_t size_class = 0;
  bool in_use = false;
  Buffer* next_free = nullptr;
};

c10::Allocator* device_allocator();

// Raises OutOfMemoryError if the device has no room for so many bytes more. To be asked before the record is
// appended that would need them, and before anything is made for it: a handle that is freed must exist.
void need_room(size_t bytes, c10::DeviceIndex device);

// A data pointer of `bytes` for an existing handle, which is freed on the device when the pointer goes away.
c10::DataPtr make_data_pointer(size_t bytes, c10::DeviceIndex device, uint64_t handle);
// The buffer behind a storage that this library made; null for foreign ones (from_blob on a virtual address).
Buffer* buffer_of(const c10::StorageImpl& storage) noexcept;
Buffer* buffer_of(const c10::DataPtr& data) noexcept;

// A tensor's handle, and how many bytes its storage begins behind the beginning of the buffer (not 0 only for
// foreign storages).
struct Location {
  uint64_t handle;
  size_t displacement;
};
Location locate(const c10::StorageImpl& storage);
inline Location locate(const at::TensorBase& tensor) {
  return locate(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

// Gives a storage another size; contents stay, the handle stays, the address may change. With `record`, the
// device does the same; without, an operator on the device has done it.
void resize_storage(c10::StorageImpl& storage, size_t bytes, bool record);

size_t address_blocks();  // that exist, in use or free

}  // namespace understudy::client
