// A kernel with an operator's own C++ signature: the steady state of forward_call without boxing.
//
// Boxing would copy every tensor, and a tensor that Python holds takes and releases the interpreter's lock
// when its count goes from one to two and back: some 1,300 instructions for each tensor of a call, items of
// lists included. What is not steady state (a first call, one that must ask the server) is boxed and goes to
// forward_call.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <torch/library.h>

#include <array>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "proxy_client/csrc/call/call_encoder.h"
#include "proxy_client/csrc/call/operator_call.h"
#include "proxy_client/csrc/call/pending_call.h"
#include "proxy_client/csrc/device/client_tensor.h"

namespace understudy::client {

// Arguments, as IValue would hold them.
inline void encode(CallEncoder& to, const at::Tensor& value) { to.tensor(value); }
inline void encode(CallEncoder& to, int64_t value) { to.integer(value); }
inline void encode(CallEncoder& to, const c10::SymInt& value) { to.integer(value.expect_int()); }
inline void encode(CallEncoder& to, bool value) { to.boolean(value); }
inline void encode(CallEncoder& to, double value) { to.number(value); }
inline void encode(CallEncoder& to, at::ScalarType value) { to.integer(static_cast<int64_t>(value)); }
inline void encode(CallEncoder& to, at::MemoryFormat value) { to.integer(static_cast<int64_t>(value)); }
inline void encode(CallEncoder& to, std::string_view value) { to.string(value); }
inline void encode(CallEncoder& to, const at::Scalar& value) {
  if (value.isFloatingPoint()) return to.number(value.toDouble());
  if (value.isComplex()) return to.complex(value.toComplexDouble());
  if (value.isBoolean()) return to.boolean(value.toBool());
  to.integer(value.toLong());
}
inline void encode(CallEncoder& to, c10::IntArrayRef value) { to.integers(value); }
inline void encode(CallEncoder& to, c10::SymIntArrayRef value) {
  to.integers(C10_AS_INTARRAYREF_SLOW(value));
}
inline void encode(CallEncoder& to, at::TensorList value) {
  to.begin_list(replay::Tag::kTensorList, value.size());
  for (const at::Tensor& item : value) to.tensor(item);
}
inline void encode(CallEncoder& to, const at::ITensorListRef& value) {
  to.begin_list(replay::Tag::kTensorList, value.size());
  for (const at::Tensor& item : value) to.tensor(item);
}
inline void encode(CallEncoder& to, at::ArrayRef<at::Scalar> value) {
  to.begin_list(replay::Tag::kList, value.size());
  for (const at::Scalar& item : value) encode(to, item);
}
template <size_t N>
void encode(CallEncoder& to, const std::array<bool, N>& value) {
  to.begin_list(replay::Tag::kBoolList, N);
  for (const bool item : value) to.word(item);
}
inline void encode(CallEncoder& to, const std::optional<at::Generator>& value) { to.generator(value); }
template <class T>
void encode(CallEncoder& to, const std::optional<T>& value) {
  if (value) return encode(to, *value);
  to.none();
}
inline void encode(CallEncoder& to, const at::OptionalIntArrayRef& value) {
  if (value) return encode(to, *value);
  to.none();
}
inline void encode(CallEncoder& to, const at::OptionalSymIntArrayRef& value) {
  if (value) return encode(to, *value);
  to.none();
}

// One call on its way through its own signature.
class DirectCall {
 public:
  explicit DirectCall(const OperatorInfo& info)
      : info_(info),
        thread_(thread_state()),
        device_(bound_device()),
        log_(log_for(device_)),
        lease_(thread_) {
    raise_if_failed(log_);
    (*lease_).key.clear();
    (*lease_).values.clear();
    (*lease_).key.push(key_head(info));
  }
  CallEncoder encoder() { return {*lease_, log_, /*sized_by_numbers=*/false}; }

  // The call's template, or null if the call cannot be done here.
  const CallTemplate* find() {
    timer_.finish(&Statistics::encode_ticks);
    const WordBuffer& key = (*lease_).key;
    const CallTemplate* const known = thread_.templates.find(key);
    timer_.finish(&Statistics::lookup_ticks);
    if (C10_UNLIKELY(!known || !known->direct)) return nullptr;
    count(&Statistics::hits);
    need_room(known->fresh_bytes, device_);
    next_handle_ = first_handle_ = known->fresh != 0 ? new_handles(known->fresh) : 0;
    return known;
  }

  at::Tensor make(const Output& output) {
    if (C10_UNLIKELY(output.origin == Output::Origin::kUndefined)) return {};
    return make_tensor(make_storage(output.bytes, device_, next_handle_++),
                       {output.dtype, output.offset, output.sizes, output.strides});
  }
  std::vector<at::Tensor> make(const std::vector<Output>& outputs) {
    std::vector<at::Tensor> made;
    made.reserve(outputs.size());
    for (const Output& output : outputs) made.push_back(make(output));
    return made;
  }

  void append(const CallTemplate& entry) {
    timer_.finish(&Statistics::output_ticks);
    append_operator(log_, entry, (*lease_).values, first_handle_);
    timer_.finish(&Statistics::append_ticks);
  }

 private:
  StageTimer timer_;
  const OperatorInfo& info_;
  ThreadState& thread_;
  const c10::DeviceIndex device_;
  LogWriter& log_;
  EncodingLease lease_;
  uint64_t first_handle_ = 0, next_handle_ = 0;
};

template <class Op, class Schema = typename Op::schema>
struct Direct;

template <class Op, class Return, class... Arguments>
struct Direct<Op, Return(Arguments...)> {
  static Return call(Arguments... arguments) {
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    static const OperatorInfo& info = operator_info(op);
    {
      DirectCall direct(info);
      CallEncoder encoder = direct.encoder();
      (encode(encoder, arguments), ...);
      if (const CallTemplate* known = direct.find(); C10_LIKELY(known != nullptr))
        return finish(direct, *known, arguments...);
    }
    torch::jit::Stack stack = c10::impl::boxArgs<Arguments...>(std::forward<Arguments>(arguments)...);
    forward_call(op, c10::DispatchKeySet(), &stack);
    if constexpr (std::is_same_v<Return, at::Tensor&>) {
      return first(arguments...);
    } else if constexpr (!std::is_void_v<Return>) {
      return c10::impl::PopResult<Return>::call(stack);
    }
  }

 private:
  static Return finish(DirectCall& direct, const CallTemplate& known, Arguments... arguments) {
    if constexpr (std::is_void_v<Return>) {
      direct.append(known);
    } else if constexpr (std::is_same_v<Return, at::Tensor&>) {
      direct.append(known);
      return first(arguments...);
    } else if constexpr (std::is_same_v<Return, at::Tensor>) {
      at::Tensor result = direct.make(known.results[0].outputs[0]);
      direct.append(known);
      return result;
    } else if constexpr (std::is_same_v<Return, std::vector<at::Tensor>>) {
      Return results = direct.make(known.results[0].outputs);
      direct.append(known);
      return results;
    } else {
      Return results = make_tuple(direct, known, std::make_index_sequence<std::tuple_size_v<Return>>());
      direct.append(known);
      return results;
    }
  }
  template <size_t... I>
  static auto make_tuple(DirectCall& direct, const CallTemplate& known, std::index_sequence<I...>) {
    return Return{direct.make(known.results[I].outputs[0])...};  // braces: from the first to the last
  }
  template <class First, class... Rest>
  static First& first(First& argument, Rest&...) {
    return argument;
  }
};

// Typed kernels for the operators that training calls most, in place of boxed ones. A row names the operator
// as at::_ops does.
class DirectRegistry {
 public:
  // `forwarded`: the operators that would be registered with a boxed kernel; `on_driver`: those of the
  // driver.
  DirectRegistry(torch::Library& library, std::set<std::string>& forwarded,
                 const std::set<std::string>& on_driver)
      : library_(library), forwarded_(forwarded), on_driver_(on_driver) {}

  // Operators that PyTorch composes of others are left to it.
  template <class... Ops>
  void add() {
    (add_one<Ops>(), ...);
  }

 private:
  template <class Op>
  void add_one() {
    std::string name = Op::name;
    if (*Op::overload_name) name = name + "." + Op::overload_name;
    const bool usable = forwarded_.erase(name) + on_driver_.count(name) != 0;
    direct_operators().emplace_back(name, usable);
    if (usable) library_.impl(name.c_str() + sizeof("aten::") - 1, TORCH_FN(Direct<Op>::call));
  }

  torch::Library& library_;
  std::set<std::string>& forwarded_;
  const std::set<std::string>& on_driver_;
};

void register_direct_elementwise(DirectRegistry& registry);
void register_direct_layers(DirectRegistry& registry);
void register_direct_lists(DirectRegistry& registry);

}  // namespace understudy::client
