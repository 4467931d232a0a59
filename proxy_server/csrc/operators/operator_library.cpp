#include "proxy_server/csrc/operators/operator_library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <set>

#include "replay/csrc/log/log_map.h"

namespace understudy::server {
namespace {

using replay::LogError;

constexpr size_t kMostLibraries = 256;

struct Loaded {
  std::mutex mutex;
  std::set<std::string> paths;
};
Loaded& loaded() {
  static Loaded instance;
  return instance;
}

// Of PyTorch as it was before any foreign library came: taken while this module is loaded.
std::set<std::string> namespaces_now() {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    names.insert(name.name.substr(0, name.name.find(':')));
  return names;
}
const std::set<std::string> built_in_namespaces = namespaces_now();

// Only we or root may have written it. In a folder with the sticky bit (/tmp) nobody can replace our files.
void check_owner(const std::string& path, const struct stat& s) {
  TORCH_CHECK(s.st_uid == geteuid() || s.st_uid == 0, "the device server does not load ", path,
              ": it belongs to user ", s.st_uid, ", and only libraries of user ", geteuid(),
              " or root are loaded");
  const bool sticky_folder = S_ISDIR(s.st_mode) && (s.st_mode & S_ISVTX) != 0;
  TORCH_CHECK((s.st_mode & (S_IWGRP | S_IWOTH)) == 0 || sticky_folder, "the device server does not load ",
              path, ": others could write it; run `chmod go-w ", path, "`");
}

void check(const std::string& path) {
  struct stat file{};
  struct stat folder{};
  const std::string parent = path.substr(0, std::max<size_t>(path.rfind('/'), 1));
  TORCH_CHECK(lstat(path.c_str(), &file) == 0, "the device server cannot load ", path, ": ", strerror(errno));
  TORCH_CHECK(S_ISREG(file.st_mode), "the device server does not load ", path, ": it is not a regular file");
  TORCH_CHECK(stat(parent.c_str(), &folder) == 0, "the device server cannot load ", path, ": ",
              strerror(errno));
  check_owner(path, file);
  check_owner(parent, folder);
}

}  // namespace

OperatorName parse_operator_name(const std::string& text) {
  OperatorName name;
  const size_t end = text.find('\0');
  const std::string op = text.substr(0, end);
  const size_t dot = op.find('.');
  name.base = op.substr(0, dot);
  if (dot != std::string::npos) name.overload = op.substr(dot + 1);
  for (size_t at = end; at != std::string::npos;) {
    const size_t next = text.find('\0', at + 1);
    name.libraries.push_back(text.substr(at + 1, next == std::string::npos ? next : next - at - 1));
    at = next;
    if (name.libraries.back().empty() || name.libraries.back()[0] != '/')
      throw LogError("a library's path is not absolute");
    if (name.libraries.size() > kMostLibraries) throw LogError("a template names too many libraries");
  }
  return name;
}

void load_libraries(const std::vector<std::string>& paths) {
  std::lock_guard<std::mutex> lock(loaded().mutex);
  for (const std::string& path : paths) {
    if (loaded().paths.count(path) != 0) continue;
    check(path);
    TORCH_CHECK(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr,
                "the device server cannot load the library that the script has loaded: ", dlerror());
    loaded().paths.insert(path);
  }
}

bool is_built_in(const std::string& base) {
  return built_in_namespaces.count(base.substr(0, base.find(':'))) != 0;
}

}  // namespace understudy::server
