// What an operator's schema says, worked out once.
#pragma once
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace understudy::client {

// What the schema says of an argument, so that encoding looks first for what will be there.
enum class ArgumentKind : uint8_t {
  kTensor,  // or an optional one
  kTensorList,
  kInt,
  kIntList,
  kNumber,  // double or scalar
  kBool,
  kOther,
};

// Combinations of types that the driver has computed, as hashes.
class Combinations {
 public:
  bool knows(uint64_t combination) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return known_.count(combination) != 0;
  }
  void learn(uint64_t combination) {
    const std::lock_guard<std::mutex> lock(mutex_);
    known_.insert(combination);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_set<uint64_t> known_;
};

struct OperatorInfo {
  struct Return {
    int alias = -1;        // the argument it aliases
    bool written = false;  // it *is* that argument, which the operator wrote
  };

  std::string name;                 // "aten::add.Tensor"
  std::vector<ArgumentKind> kinds;  // per argument
  std::vector<bool> writes;         // per argument
  std::vector<Return> returns;
  int generator = -1;            // position of a Generator argument
  bool in_place = false;         // writes its first argument and returns it
  bool has_out = false;          // an out= variant
  bool creates = true;           // no tensor among its arguments: a factory
  bool sized_by_numbers = true;  // nor any but out=: its numbers decide shapes
  bool dynamic = false;          // output shapes depend on values
  bool returns_tensors = true;   // and nothing else, but numbers that follow from shapes
  bool returns_written = true;   // every return is a written argument (or there is none)
  bool constant = false;         // its result depends on metadata only and costs a round trip
  bool custom = false;           // not PyTorch's own: see custom_operators.h
  std::optional<c10::SafeKernelFunction> shape_kernel;  // C++ meta kernel
  mutable std::atomic<uint32_t> misses{0};              // templates made for it
  mutable Combinations computed;                        // of its arguments' types
};

// Safe from any thread; the result lives as long as the process.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

}  // namespace understudy::client
