// Libraries of the script that register operators: loaded into this server before it runs such an operator.
#pragma once
#include <string>
#include <vector>

namespace understudy::server {

// The name of a template: an operator, then the libraries the worker had loaded, with zero bytes between.
struct OperatorName {
  std::string base, overload;  // "aten::add", "Tensor"
  std::vector<std::string> libraries;
  std::string full() const { return overload.empty() ? base : base + "." + overload; }
};
// Throws LogError if the name makes no sense.
OperatorName parse_operator_name(const std::string& text);

// Loads what is not loaded yet. A library runs with all rights of this process, so each must be an absolute
// path to a regular file of this user (or root) that nobody else can write, in a folder of which the same is
// true. Throws c10::Error, which the worker gets, if one is not or does not load.
void load_libraries(const std::vector<std::string>& paths);

// True for operators of PyTorch itself, by their namespace.
bool is_built_in(const std::string& base);

}  // namespace understudy::server
