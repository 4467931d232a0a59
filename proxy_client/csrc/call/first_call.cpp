#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/hash.h>

#include <algorithm>

#include "proxy_client/csrc/call/below_autograd.h"
#include "proxy_client/csrc/call/pending_call.h"
#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/operators/device_check.h"
#include "proxy_client/csrc/shapes/server_reply.h"
#include "proxy_client/csrc/shapes/shape_inference.h"
#include "proxy_client/csrc/sparse/sparse_tensor.h"
#include "replay/csrc/log/handles.h"

namespace understudy::client {
namespace {

using at::Tensor;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

// An operator with more templates than this is called with ever new shapes: infer them instead of asking.
constexpr uint32_t kLearnLimit = 24;

bool has_boolean_index(Arguments arguments) {
  for (const IValue& argument : arguments) {
    if (!argument.isOptionalTensorList()) continue;
    for (const IValue& item : argument.toListRef()) {
      if (!item.isTensor() || !item.toTensor().defined()) continue;
      const auto dtype = item.toTensor().scalar_type();
      if (dtype == at::kBool || dtype == at::kByte) return true;
    }
  }
  return false;
}

// copy_ has no meta kernel that could say so.
void check_copy(const Tensor& to, const Tensor& from) {
  const auto shape = at::infer_size(to.sizes(), from.sizes());
  TORCH_CHECK(to.sizes() == c10::IntArrayRef(shape), "output with shape ", to.sizes(),
              " doesn't match the broadcast shape ", c10::IntArrayRef(shape));
}

uint64_t number_of_type(const Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const auto scalar = static_cast<uint64_t>(tensor.scalar_type());
  return 1 + (scalar << 1 | static_cast<uint64_t>(tensor.dim() == 0)) * 16 +
         static_cast<uint64_t>(tensor.layout());
}

// What a kernel may refuse though shapes fit: the types of tensors and numbers, switches and names.
uint64_t combination_of(Arguments arguments) {
  size_t hash = arguments.size();
  const auto add = [&hash](uint64_t value) { hash = c10::hash_combine(hash, value); };
  for (const IValue& argument : arguments) {
    if (argument.isTensor())
      add(number_of_type(argument.toTensor()));
    else if (argument.isTensorList() || argument.isOptionalTensorList())
      for (const IValue& item : argument.toListRef())
        add(item.isTensor() ? number_of_type(item.toTensor()) : 0);
    else if (argument.isBool())
      add(1 + static_cast<uint64_t>(argument.toBool()));
    else if (argument.isString())
      add(c10::hash<std::string>{}(argument.toStringRef()));
    else
      add(argument.isNone() ? 3 : argument.isDouble() ? 4 : argument.isComplexDouble() ? 5 : 6);
  }
  return hash;
}

enum class Plan { kAsync, kLearn, kSync };

// How a call that has no template yet finds its results. Fills in `entry` for kAsync.
Plan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info, Arguments arguments,
               CallTemplate& entry) {
  const bool boolean_index = has_boolean_index(arguments);
  // A combination of types that was never computed may have no kernel, of which meta kernels know nothing.
  const bool changing = info.misses.fetch_add(1, std::memory_order_relaxed) >= kLearnLimit &&
                        info.computed.knows(combination_of(arguments));
  if (info.returns_written && !info.has_out) {
    // In place, or nothing returned: there is no shape to know. The first call waits all the same, because
    // arguments that do not fit together must raise here, not later and for good.
    if (!changing) return Plan::kLearn;
    if (info.name == "aten::copy_") check_copy(arguments[0].toTensor(), arguments[1].toTensor());
    if (boolean_index || !infer_shapes(op, info, arguments, entry)) entry.results.resize(info.returns.size());
    return Plan::kAsync;
  }
  if (boolean_index || info.dynamic || !info.returns_tensors) return Plan::kSync;
  // Not for out=: meta kernels need not give it the strides that the driver's kernel gives.
  if (changing && !info.has_out && infer_shapes(op, info, arguments, entry)) return Plan::kAsync;
  return Plan::kLearn;
}

// A sparse tensor's pieces may have other lengths next time: nothing can be learnt.
bool gives_composite(const std::vector<IValue>& values) {
  return std::any_of(values.begin(), values.end(),
                     [](const IValue& value) { return value.isTensor() && is_composite(value.toTensor()); });
}

// True if the driver's kernel gave this out= argument another shape, or conjugated it lazily.
bool was_resized(const Tensor& mine, const IValue& returned) {
  if (!returned.isTensor() || !returned.toTensor().defined()) return false;
  const Tensor& theirs = returned.toTensor();
  if (!mine.has_storage() || !theirs.has_storage()) return false;
  return theirs.is_alias_of(mine) && (mine.sizes() != theirs.sizes() || mine.strides() != theirs.strides() ||
                                      lazy_flags(mine) != lazy_flags(theirs));
}

// What a synchronous execution told about the results of all later ones.
void learn_results(const OperatorInfo& info, Arguments arguments, const std::vector<IValue>& values,
                   c10::ArrayRef<Tensor> device_arguments, CallTemplate& entry) {
  const auto describe = [&](const Tensor& tensor) {
    return describe_output(tensor, device_arguments, tensor.defined() ? tensor.storage().nbytes() : 0);
  };
  for (size_t i = 0; i < info.returns.size(); i++) {
    if (info.returns[i].written) {
      Result& result = entry.results.emplace_back();
      const IValue& written = arguments[static_cast<size_t>(info.returns[i].alias)];
      if (!written.isTensor() || !was_resized(written.toTensor(), values[i])) continue;
      const Tensor& theirs = values[i].toTensor();
      const uint64_t flags = lazy_flags(theirs);
      if (flags != lazy_flags(written.toTensor())) result.flags = flags | replay::kOtherFlags;
      for (size_t k = 0; k < device_arguments.size(); k++)
        if (device_arguments[k].is_same(written.toTensor()))
          entry.resizes.push_back({k, theirs.sizes().vec(), theirs.strides().vec(), flags});
      continue;
    }
    entry.results.push_back(describe_result(values[i], describe));
  }
  summarise(entry);
}

// Runs the call and returns what the server answered; `values` may alias the call's arguments.
std::vector<IValue> exchange(const PendingCall& pending, const CallTemplate& entry,
                             c10::ArrayRef<Tensor> device_arguments) {
  count(&Statistics::synchronous);
  const uint64_t base = new_handles(replay::kHandlesPerSyncCall);
  const WordBuffer& sent = pending.encoding.values;
  std::vector<IValue> values;
  send_with_template(pending.log, entry, [&](uint64_t id) {
    call(
        pending.log, Kind::kOperatorSync, id, sent.size() + 1,
        [&](uint64_t* body) { *std::copy_n(sent.data(), sent.size(), body) = base; },
        [&](const uint8_t* payload, size_t bytes) {
          values = decode_reply(payload, bytes, device_arguments, pending.device);
        });
  });
  TORCH_CHECK(values.size() == pending.info.returns.size(), "the device server returned ", values.size(),
              " values for ", pending.info.name, ", which has ", pending.info.returns.size());
  return values;
}

// The server's kernel may have resized an out= argument: do as it did.
IValue written_argument(const PendingCall& call, size_t result, const IValue& returned) {
  const IValue& argument = call.arguments[static_cast<size_t>(call.info.returns[result].alias)];
  if (argument.isTensor() && was_resized(argument.toTensor(), returned)) {
    const Tensor& theirs = returned.toTensor();
    resize_tensor(argument.toTensor(), theirs.sizes(), theirs.strides(), /*record=*/false);
    set_lazy_flags(argument.toTensor(), lazy_flags(theirs));
  }
  return argument;
}

void deliver(const PendingCall& call, std::vector<IValue> values, Results& results) {
  for (size_t i = 0; i < values.size(); i++)
    results.push_back(call.info.returns[i].written ? written_argument(call, i, values[i])
                                                   : std::move(values[i]));
}

// A synchronous call whose results are those of all later ones too.
void run_and_learn(const PendingCall& call, c10::intrusive_ptr<CallTemplate> entry, Results& results) {
  const std::vector<Tensor> device_arguments = device_tensors(call.arguments);
  std::vector<IValue> values = exchange(call, *entry, device_arguments);
  call.info.computed.learn(combination_of(call.arguments));
  if (call.info.constant) {
    entry->constant = values[0];
  } else if (!gives_composite(values)) {
    learn_results(call.info, call.arguments, values, device_arguments, *entry);
    entry->synchronous = false;
    publish(call.log, *entry);
  }
  call.thread.templates.keep(std::move(entry));
  deliver(call, std::move(values), results);
}

}  // namespace

void run_sync(const PendingCall& call, const CallTemplate& entry, Results& results) {
  const BelowAutograd guard;
  deliver(call, exchange(call, entry, device_tensors(call.arguments)), results);
}

void run_first(const PendingCall& call, Results& results) {
  const BelowAutograd guard;
  count(&Statistics::misses);
  check_devices(call.op, call.info, call.arguments);
  auto entry = c10::make_intrusive<CallTemplate>();
  entry->key.assign(call.encoding.key.data(), call.encoding.key.data() + call.encoding.key.size());
  const Plan plan = plan_call(call.op, call.info, call.arguments, *entry);
  entry->synchronous = plan != Plan::kAsync;
  publish(call.log, *entry);
  if (plan == Plan::kAsync) return run_async(call, *call.thread.templates.keep(std::move(entry)), results);
  if (plan == Plan::kLearn || call.info.constant) return run_and_learn(call, std::move(entry), results);
  run_sync(call, *call.thread.templates.keep(std::move(entry)), results);
}

}  // namespace understudy::client
