// A template: one operator call with everything that does not change from step to step, parsed once.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "proxy_server/csrc/calls/words.h"
#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/operators/wider_types.h"
#include "replay/csrc/log/log_map.h"

namespace understudy::server {

struct TensorSpec {
  uint64_t serial = 0;  // its name: no other one of the session ever has it
  caffe2::TypeMeta type;
  c10::ScalarType dtype{};
  uint8_t flags = 0;
  int64_t offset = 0;         // elements
  uint64_t extent_bytes = 0;  // a storage must have at least this many
  std::vector<int64_t> sizes, strides;
};

struct CompositeSpec;  // composite.h

using SharedSpec = std::shared_ptr<const TensorSpec>;

// Each distinct layout that templates use once.
class SpecTable {
 public:
  SharedSpec intern(TensorSpec spec);
  // Those that no template uses any more.
  void drop_unused();

 private:
  struct Less {
    bool operator()(const SharedSpec& a, const SharedSpec& b) const;
  };
  std::set<SharedSpec, Less> specs_;
  uint64_t last_serial_ = 0;
};

struct ArgumentSpec {
  replay::Tag tag{};
  bool written = false;  // the operator changes this tensor
  bool on_host = false;  // its kernel reads this tensor on the host, on every device
  uint64_t count = 0;
  SharedSpec tensor;
  std::vector<ArgumentSpec> items;
  std::shared_ptr<const CompositeSpec> composite;
  c10::IValue constant;
};

struct OutputSpec {
  bool fresh = false;
  SharedSpec tensor;
  uint64_t storage_bytes = 0;
};

struct ReturnSpec {
  uint64_t kind = 0;   // 0 = a written argument, 1 = tensor, 2 = list, 3 = number
  uint64_t flags = 0;  // of a written argument: kOtherFlags and the bits, if they are not those it came with
  int64_t number = 0;
  std::vector<OutputSpec> items;
};

struct Template {
  std::string name;
  c10::OperatorHandle op;
  std::vector<ArgumentSpec> arguments;
  std::vector<ReturnSpec> returns;
  bool writes = false;          // any tensor argument
  bool on_driver = false;       // its kernel is the driver's for sure: no need to look at the arguments' keys
  bool only_allocates = false;  // nothing writes its result
  bool leaves_unwritten = false;   // bytes of its results, which are to be zero
  uint64_t digest = 0;             // of the name and everything else that it says
  bool of_attention = false;       // gradients of fused attention: see OnlyExact
  bool without_gradients = false;  // run it where no gradients are recorded: its kernel asks
  std::shared_ptr<const Widening> widening = nullptr;  // if its kernel does not know these element types
};

// Parses and checks a template of the dictionary. Throws replay::LogError for a malformed one
// and c10::Error (NotImplementedError) for an operator that does not exist here or must not be run.
std::unique_ptr<Template> parse_template(const replay::LogMap& log, uint64_t id, const Driver& driver,
                                         SpecTable& specs);

// The rest of a collective's tensor, behind its tensor word and handle: [offset, sizes, strides].
TensorSpec parse_tensor(uint64_t word, Words& words);

// Bytes of storage that sizes, strides and offset reach. Throws on negative values and on overflow.
uint64_t extent_of(const TensorSpec& spec);

// An element type, and the sizes of a tensor of so many dimensions; both throw if they make no sense.
c10::ScalarType scalar_type(uint64_t code);
std::vector<int64_t> take_sizes(Words& words, uint64_t dimensions);

// Throws if a tensor would reach behind its storage.
inline void check_extent(const c10::Storage& storage, const TensorSpec& spec) {
  if (__builtin_expect(spec.extent_bytes > storage.nbytes(), 0))
    throw replay::LogError("a tensor reaches " + std::to_string(spec.extent_bytes) +
                           " bytes into a buffer of " + std::to_string(storage.nbytes()));
}

// A tensor over `storage`; throws if it does not fit.
at::Tensor view_of(const c10::Storage& storage, const TensorSpec& spec);

}  // namespace understudy::server
