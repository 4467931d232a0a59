#include "proxy_client/csrc/autograd_drain.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <type_traits>

#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/session.h"

namespace understudy::client {
namespace {

using torch::autograd::variable_list;

// A node of the device that does nothing.
struct Nothing final : torch::autograd::Node {
  variable_list apply(variable_list&&) override { return {}; }
};

// Edges hold nodes by c10::intrusive_ptr, up to PyTorch 2.11 by std::shared_ptr.
template <class Pointer>
Pointer make_nothing() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Nothing>();
  else
    return c10::make_intrusive<Nothing>();
}

// PyTorch starts these threads with the first backward pass; starting them now would be worse than nothing.
bool has_autograd_threads() {
  std::error_code ignored;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::ifstream comm(task.path() / "comm");
    std::string name;
    if (std::getline(comm, name) && name.rfind("pt_autograd_", 0) == 0) return true;
  }
  return false;
}

}  // namespace

void drain_autograd_threads() {
  if (!has_autograd_threads()) return;
  const c10::Device device(c10::kCUDA, bound_device());
  // A gradient without memory: this must also work when the device has failed.
  c10::Storage nowhere(c10::Storage::use_byte_size_t(), sizeof(float), c10::DataPtr(nullptr, device), nullptr,
                       false);
  const at::Tensor gradient = make_tensor(std::move(nowhere), {at::kFloat, 0, {}, {}});
  auto node = make_nothing<decltype(torch::autograd::Edge::function)>();
  node->add_input_metadata(gradient);
  // The queue of a device is served in order: when this has run, what came before it is over.
  torch::autograd::Engine::get_default_engine().execute({torch::autograd::Edge(node, 0)}, {gradient},
                                                        /*keep_graph=*/false, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

}  // namespace understudy::client
