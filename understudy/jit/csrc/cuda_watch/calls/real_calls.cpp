#include "understudy/jit/csrc/cuda_watch/calls/real_calls.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>

namespace understudy::cuda {
namespace {

struct Search {
  const char* library;  // as its file name begins
  char path[4096];
};

int look_at(dl_phdr_info* info, std::size_t, void* data) {
  auto* const search = static_cast<Search*>(data);
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  const char* const name = slash != nullptr ? slash + 1 : info->dlpi_name;
  const std::size_t length = std::strlen(info->dlpi_name);
  if (std::strncmp(name, search->library, std::strlen(search->library)) != 0 || length >= sizeof search->path)
    return 0;
  std::memcpy(search->path, info->dlpi_name, length + 1);
  return 1;
}

}  // namespace

void* find_call(const char* name) {
  if (void* const next = dlsym(RTLD_NEXT, name)) return next;
  Search search{std::strncmp(name, "nccl", 4) == 0 ? "libnccl.so" : "libcudart.so", {}};
  if (dl_iterate_phdr(look_at, &search) == 0) return nullptr;
  void* const library = dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* const found = dlsym(library, name);
  dlclose(library);  // whoever has loaded it keeps it
  return found;
}

}  // namespace understudy::cuda
