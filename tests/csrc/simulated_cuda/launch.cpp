// Every operator that has no kernel of its own here runs the CPU's, in the device's memory, on a stream's
// thread.
//
// As on a GPU the call returns before that: what its results look like was learned at the first call of its
// kind, which is waited for, as are calls whose results' shapes depend on data, or that draw random numbers.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/csrc/simulated_cuda/failures.h"
#include "tests/csrc/simulated_cuda/host_views.h"
#include "tests/csrc/simulated_cuda/launch.h"
#include "tests/csrc/simulated_cuda/runtime.h"

namespace understudy::simulated {
namespace {

using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

// ---------------------------------------------------------------- arguments
struct Argument {
  at::Tensor device, host;
};

// The arguments of one call for the CPU's kernel, and what they were.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack) : op_(op), in_place_(op.schema().is_mutable()) {
    const size_t count = op.schema().arguments().size();
    given_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
    for (const c10::IValue& value : given_) host_.push_back(for_kernels(value));
  }

  const c10::OperatorHandle& op() const { return op_; }
  const std::vector<Argument>& arguments() const { return arguments_; }

  // What the kernel answers; in a stream, or for views of no content anywhere.
  Stack run() const {
    Stack stack = host_;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

  // Equal for two calls whose results look alike; empty if that cannot be said.
  std::string kind() const {
    std::string key;
    return std::all_of(given_.begin(), given_.end(), [&](const auto& v) { return describe(v, key); })
               ? key
               : std::string();
  }

  // For a call that runs later: the content of the host's tensors may be another one by then, and the
  // device's memory must not be kept, since nobody keeps it on a GPU.
  void let_go() {
    for (c10::IValue& value : host_)
      if (value.isTensor() && value.toTensor().defined() && !is_argument(value.toTensor()))
        value = copy_of(value.toTensor());
    given_.clear();
    for (Argument& argument : arguments_) argument.device.reset();
  }

 private:
  static at::Tensor copy_of(const at::Tensor& host) {
    at::Tensor copy = host.clone();
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  bool is_argument(const at::Tensor& host) const {
    return std::any_of(arguments_.begin(), arguments_.end(),
                       [&](const Argument& a) { return a.host.is_same(host); });
  }

  at::Tensor tensor_for_kernels(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const Argument& known : arguments_)
      if (known.device.is_same(tensor)) return known.host;
    // What has no memory yet may get some as a result.
    at::Tensor host = tensor.storage().nbytes() == 0 && tensor.numel() == 0
                          ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                          : host_view(tensor);
    arguments_.push_back({tensor, host});
    return host;
  }

  c10::IValue for_kernels(const c10::IValue& value) {
    if (value.isTensor()) return tensor_for_kernels(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(tensor_for_kernels(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        list.push_back(one ? std::optional(tensor_for_kernels(*one)) : one);
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    return value;
  }

  template <class T>
  static void put(std::string& key, const T& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void describe(const at::Tensor& tensor, std::string& key) const {
    if (!tensor.defined()) return put(key, 'u');
    const Form form = form_of(tensor);
    put(key, tensor.is_cuda() ? 'd' : 'h');
    for (const auto* numbers : {&form.sizes, &form.strides}) {
      put(key, numbers->size());
      for (const int64_t number : *numbers) put(key, number);
    }
    put(key, form.offset), put(key, form.type);
    put(key, form.conjugated), put(key, form.negated);
    put(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
    const auto same = [&](const Argument& a) { return a.device.storage().is_alias_of(tensor.storage()); };
    put(key, std::find_if(arguments_.begin(), arguments_.end(), same) - arguments_.begin());
  }

  bool describe(const c10::IValue& value, std::string& key) const {
    put(key, value.tagKind()[0]);
    if (value.isTensor()) return describe(value.toTensor(), key), true;
    if (value.isNone()) return true;
    if (value.isInt()) return put(key, value.toInt()), true;
    if (value.isDouble()) return in_place_ || (put(key, value.toDouble()), true);
    if (value.isBool()) return put(key, value.toBool()), true;
    if (value.isComplexDouble()) return put(key, value.toComplexDouble()), true;
    if (value.isDevice()) return put(key, value.toDevice().index()), true;
    if (value.isString()) return key.append(value.toStringRef()).push_back('\0'), true;
    if (!value.isList()) return false;
    const c10::ArrayRef<c10::IValue> list = value.toListRef();
    put(key, list.size());
    return std::all_of(list.begin(), list.end(), [&](const auto& one) { return describe(one, key); });
  }

  c10::OperatorHandle op_;
  bool in_place_;  // no number changes what the results look like
  Stack given_, host_;
  std::vector<Argument> arguments_;
};

// ---------------------------------------------------------------- results
struct Result {
  enum Kind { kUndefined, kArgument, kView, kFresh, kOther } kind = kOther;
  size_t number = 0;  // of the argument, or of the storage that is fresh
  Form form;
  bool operator==(const Result&) const = default;
};

// What a call answered but for the content: each value's results, and how large the fresh storages are.
struct Answer {
  struct Value {
    bool is_list = false;
    std::vector<Result> results;
    bool operator==(const Value&) const = default;
  };
  std::vector<Value> values;
  std::vector<uint64_t> storages;
  bool only_tensors = true;
  bool operator==(const Answer&) const = default;
};

// Finds out what the kernel's results are to the arguments; `fresh`: storages of the kernel, in their order.
class Reading {
 public:
  Reading(const Call& call, const Stack& answered) : call_(call) {
    for (const c10::IValue& value : answered) {
      Answer::Value read;
      if (value.isTensor()) {
        read.results.push_back(result(value.toTensor()));
      } else if (value.isTensorList()) {
        read.is_list = true;
        for (const at::Tensor& one : value.toTensorVector()) read.results.push_back(result(one));
      } else {
        answer.only_tensors = false;
        read.results.push_back({});
      }
      answer.values.push_back(std::move(read));
    }
  }
  Answer answer;
  std::vector<c10::Storage> fresh;

 private:
  Result result(const at::Tensor& tensor) {
    if (!tensor.defined()) return {Result::kUndefined, 0, {}};
    const auto& arguments = call_.arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].host.is_same(tensor)) return {Result::kArgument, i, form_of(tensor)};
    for (size_t i = 0; i < arguments.size(); i++)
      if (tensor.storage().data() != nullptr && arguments[i].host.storage().data() == tensor.storage().data())
        return {Result::kView, i, form_of(tensor)};
    size_t number = 0;
    while (number < fresh.size() && !fresh[number].is_alias_of(tensor.storage())) number++;
    if (number == fresh.size()) {
      fresh.push_back(tensor.storage());
      answer.storages.push_back(tensor.storage().nbytes());
    }
    return {Result::kFresh, number, form_of(tensor)};
  }
  const Call& call_;
};

at::Tensor on_device(const Call& call, const Result& result, const std::vector<c10::Storage>& storages) {
  switch (result.kind) {
    case Result::kArgument:
      return call.arguments()[result.number].device;
    case Result::kView:
      return with_form(call.arguments()[result.number].device.storage(), c10::DispatchKey::CUDA, result.form);
    case Result::kFresh:
      return with_form(storages[result.number], c10::DispatchKey::CUDA, result.form);
    default:
      return {};
  }
}

void push_results(const Call& call, const Answer& answer, const std::vector<c10::Storage>& storages,
                  const Stack* others, Stack& to) {
  for (size_t i = 0; i < answer.values.size(); i++) {
    const Answer::Value& value = answer.values[i];
    if (value.is_list) {
      c10::List<at::Tensor> list;
      for (const Result& one : value.results) list.push_back(on_device(call, one, storages));
      to.emplace_back(std::move(list));
    } else if (value.results[0].kind == Result::kOther) {
      to.push_back((*others)[i]);
    } else {
      to.emplace_back(on_device(call, value.results[0], storages));
    }
  }
}

std::vector<c10::Storage> make_storages(const Answer& answer) {
  std::vector<c10::Storage> made;
  for (const uint64_t bytes : answer.storages) made.push_back(device_storage(bytes));
  return made;
}

std::vector<c10::Storage> host_views(const std::vector<c10::Storage>& storages) {
  std::vector<c10::Storage> views;
  for (const c10::Storage& one : storages) views.push_back(host_view(one));
  return views;
}

void fill(const std::vector<c10::Storage>& to, const std::vector<c10::Storage>& from) {
  for (size_t i = 0; i < to.size(); i++)
    if (to[i].nbytes() != 0) std::memcpy(to[i].mutable_data(), from[i].data(), to[i].nbytes());
  if (computes_wrongly() && !to.empty() && to[0].nbytes() != 0)
    static_cast<uint8_t*>(to[0].mutable_data())[0] ^= 1;
}

// A result given as `out` that the kernel made larger, or conjugated lazily. Whether there was any.
bool take_over_forms(const Call& call) {
  bool any = false;
  for (const Argument& argument : call.arguments()) {
    if (form_of(argument.host) == form_of(argument.device)) continue;
    any = true;
    c10::StorageImpl* const own = argument.device.storage().unsafeGetStorageImpl();
    const c10::Storage from = argument.host.storage();
    if (own->nbytes() < from.nbytes()) {
      own->set_data_ptr_noswap(allocator()->allocate(from.nbytes()));
      own->set_nbytes(from.nbytes());
      const c10::Storage to = host_view(argument.device.storage());
      current_stream().enqueue([to, from] { std::memcpy(to.mutable_data(), from.data(), from.nbytes()); });
    }
    argument.device.unsafeGetTensorImpl()->set_sizes_and_strides(
        argument.host.sizes(), argument.host.strides(), argument.host.storage_offset());
    argument.device._set_conj(argument.host.is_conj());
    argument.device._set_neg(argument.host.is_neg());
  }
  return any;
}

// ---------------------------------------------------------------- what calls of a kind answer
std::mutex learned_mutex;
std::unordered_map<std::string, Answer>& learned() {
  static auto* const answers = new std::unordered_map<std::string, Answer>;
  return *answers;
}

bool may_be_learned(const c10::OperatorHandle& op) {
  return !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output) &&
         !op.hasTag(at::Tag::nondeterministic_seeded);
}

bool only_makes_views(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& one) {
           return one.alias_info() != nullptr && !one.alias_info()->isWrite();
         });
}

void make_views(const Call& call, Stack& stack) {
  const Stack answered = call.run();
  const Reading reading(call, answered);
  TORCH_CHECK(reading.fresh.empty(), call.op().schema().name(),
              " copies on the simulated CUDA device, where it should only make views");
  push_results(call, reading.answer, {}, &answered, stack);
}

void run_now(const Call& call, const std::string& kind, Stack& stack) {
  Stack answered;
  std::exception_ptr problem;
  Stream& stream = current_stream();
  stream.wait(stream.enqueue_kernel([&] {
    try {
      answered = call.run();
    } catch (...) {
      problem = std::current_exception();
    }
  }));
  check(Place::kLaunch);  // the stream may have had an error before it came to this
  if (problem) std::rethrow_exception(problem);
  const Reading reading(call, answered);
  const std::vector<c10::Storage> storages = make_storages(reading.answer);
  stream.enqueue([to = host_views(storages), from = reading.fresh] { fill(to, from); });
  const bool as_they_were = !take_over_forms(call);
  if (!kind.empty() && reading.answer.only_tensors && as_they_were) {
    const std::lock_guard<std::mutex> lock(learned_mutex);
    learned()[kind] = reading.answer;
  }
  push_results(call, reading.answer, storages, &answered, stack);
}

void run_later(std::shared_ptr<Call> call, const Answer& answer, Stack& stack) {
  const std::vector<c10::Storage> storages = make_storages(answer);
  push_results(*call, answer, storages, nullptr, stack);
  call->let_go();
  current_stream().enqueue_kernel([call, answer, to = host_views(storages)] {
    const Stack answered = call->run();
    const Reading reading(*call, answered);
    TORCH_CHECK(reading.answer == answer, call->op().schema().name(),
                " gave results of other shapes on the simulated CUDA device than a call of its kind before");
    fill(to, reading.fresh);
  });
}

void launch(const c10::OperatorHandle& op, Stack* stack) {
  check(Place::kLaunch);
  auto call = std::make_shared<Call>(op, *stack);
  Stack results;
  if (only_makes_views(op.schema())) {
    make_views(*call, results);
  } else {
    counters().launches++;
    std::string kind = may_be_learned(op) ? call->kind() : std::string();
    if (!kind.empty()) kind.insert(0, toString(op.schema().operator_name()) + '\0');
    const Answer* known = nullptr;
    {
      const std::lock_guard<std::mutex> lock(learned_mutex);
      const auto found = kind.empty() ? learned().end() : learned().find(kind);
      if (found != learned().end()) known = &found->second;  // the map's values stay where they are
    }
    if (known != nullptr)
      run_later(call, *known, results);
    else
      run_now(*call, kind, results);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace

torch::CppFunction launched() { return torch::CppFunction::makeFromBoxedFunction<&launch>(); }

}  // namespace understudy::simulated
