#include "proxy_client/csrc/operators/custom_operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <dlfcn.h>
#include <elf.h>
#include <limits.h>
#include <link.h>
#include <stdlib.h>

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "proxy_client/csrc/device/device.h"

namespace understudy::client {
namespace {

using c10::DispatchKey;

// torch.library notes the Python file (or "<stdin>") that registered a kernel; TORCH_LIBRARY the C++ file.
bool is_python(const c10::OperatorHandle& op, DispatchKey key) {
  const std::string& origin = op.getComputedKernelForDispatchKey(key).debug();
  return origin.find(".py:") != std::string::npos || origin.find(" at <") != std::string::npos;
}

bool has_native_kernel(const c10::OperatorHandle& op, DispatchKey key) {
  return op.hasKernelForDispatchKey(key) && !is_python(op, key);
}

std::string real_path(const char* path) {
  const std::unique_ptr<char, decltype(&free)> resolved(realpath(path, nullptr), &free);
  return resolved ? resolved.get() : "";
}

std::string folder_of(const void* symbol) {
  Dl_info info{};
  if (dladdr(symbol, &info) == 0 || !info.dli_fname) return "";
  const std::string path = real_path(info.dli_fname);
  return path.substr(0, path.rfind('/') + 1);
}

// Of the dynamic section: which libraries it names as needed.
bool needs_pytorch(const dl_phdr_info& object) {
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < object.dlpi_phnum; i++)
    if (object.dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
  if (!dynamic) return false;
  const char* strings = nullptr;
  for (const ElfW(Dyn)* d = dynamic; d->d_tag != DT_NULL; d++)
    if (d->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(d->d_un.d_ptr);
  if (!strings) return false;
  for (const ElfW(Dyn)* d = dynamic; d->d_tag != DT_NULL; d++) {
    if (d->d_tag != DT_NEEDED) continue;
    const std::string_view needed = strings + d->d_un.d_val;
    for (const std::string_view library : {"libc10.so", "libtorch_cpu.so", "libtorch.so"})
      if (needed == library) return true;
  }
  return false;
}

struct Search {
  std::array<std::string, 2> ignored;  // folders of PyTorch and of this library
  std::vector<std::string> found;
};

int consider(dl_phdr_info* object, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  if (!object->dlpi_name || object->dlpi_name[0] == '\0' || !needs_pytorch(*object)) return 0;
  const std::string path = real_path(object->dlpi_name);
  if (path.empty()) return 0;
  for (const std::string& folder : search.ignored)
    if (!folder.empty() && path.rfind(folder, 0) == 0) return 0;
  search.found.push_back(path);
  return 0;
}

}  // namespace

bool run_custom_operator_here(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DispatchKey driver = driver_is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  if (has_native_kernel(op, driver)) return false;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(DispatchKey::CUDA), "Could not run '", op.operator_name(),
      "' with arguments from the 'CUDA' backend: it has no kernel for CUDA. Register one (in Python: "
      "device_types=\"cuda\" or None)",
      driver_is_cpu() ? ", or a C++ kernel for CPU, which the cpu driver can run" : "");
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CUDA), stack);
  return true;
}

std::string with_libraries(const std::string& name) {
  Search search{{folder_of(reinterpret_cast<const void*>(&c10::Dispatcher::realSingleton)),
                 folder_of(reinterpret_cast<const void*>(&with_libraries))},
                {}};
  dl_iterate_phdr(&consider, &search);
  std::string text = name;
  for (const std::string& path : search.found) text.append(1, '\0').append(path);
  return text;
}

}  // namespace understudy::client
