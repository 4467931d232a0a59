#include "proxy_client/csrc/operator_call.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "proxy_client/csrc/call_encoding.h"
#include "proxy_client/csrc/client_tensor.h"
#include "proxy_client/csrc/device.h"
#include "proxy_client/csrc/server_reply.h"
#include "proxy_client/csrc/shape_cache.h"
#include "proxy_client/csrc/shape_inference.h"
#include "proxy_client/csrc/sparse/sparse_tensor.h"
#include "proxy_client/csrc/statistics.h"

namespace understudy::client {
namespace {

using at::Tensor;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

// An operator with more templates than this is called with ever new shapes: infer them instead of asking.
constexpr uint32_t kLearnLimit = 24;
constexpr uint64_t kHandlesPerSyncCall = 1024;

// What the client does itself while encoding and inferring is below autograd and autocast.
struct BelowAutograd {
  at::AutoDispatchBelowAutograd autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

// Tensors know their device by existing; only factories name one.
c10::DeviceIndex device_of(const OperatorInfo& info, Arguments arguments) {
  if (!info.creates) return bound_device();
  for (const IValue& argument : arguments)
    if (argument.isDevice() && argument.toDevice().is_cuda())
      return resolve_device(argument.toDevice()).index();
  return current_device();
}

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

void check_written_arguments(const OperatorInfo& info, Arguments arguments) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!info.writes[i] || !arguments[i].isTensor()) continue;
    const Tensor& tensor = arguments[i].toTensor();
    TORCH_CHECK(!tensor.defined() || tensor.is_cuda(), info.name,
                ": Expected all tensors to be on the same device, but it would write to a tensor on ",
                tensor.device(), " with arguments on cuda");
  }
}

enum class Plan { kAsync, kLearn, kSync };

// How a call that has no template yet finds its results. Fills in `entry` for kAsync.
Plan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info, Arguments arguments,
               CallTemplate& entry) {
  const bool boolean_index = has_boolean_index(arguments);
  const bool changing = info.misses.fetch_add(1, std::memory_order_relaxed) >= kLearnLimit;
  if (info.returns_written && !info.has_out) {
    // In place, or nothing returned: there is no shape to know. The first call waits all the same, because
    // arguments that do not fit together must raise here, not later and for good.
    if (!changing) return Plan::kLearn;
    if (boolean_index || !infer_shapes(op, info, arguments, entry)) entry.results.resize(info.returns.size());
    return Plan::kAsync;
  }
  if (boolean_index || info.dynamic || !info.returns_tensors) return Plan::kSync;
  // Not for out=: meta kernels need not give it the strides that the driver's kernel gives.
  if (changing && !info.has_out && infer_shapes(op, info, arguments, entry)) return Plan::kAsync;
  return Plan::kLearn;
}

IValue make_result(const Result& result, c10::ArrayRef<Tensor> device_arguments, c10::DeviceIndex device,
                   uint64_t& next_handle) {
  const auto make = [&](const Output& output) -> Tensor {
    const Layout layout{output.dtype, output.offset, output.sizes, output.strides};
    switch (output.origin) {
      case Output::Origin::kUndefined:
        return {};
      case Output::Origin::kArgument:
        return device_arguments[output.argument];
      case Output::Origin::kView:
        return make_tensor(device_arguments[output.argument].storage(), layout);
      default:
        return make_tensor(make_storage(output.bytes, device, next_handle++), layout);
    }
  };
  if (result.kind == Result::Kind::kTensor) return make(result.outputs[0]);
  c10::List<Tensor> list;
  list.reserve(result.outputs.size());
  for (const Output& output : result.outputs) list.push_back(make(output));
  return list;
}

// A sparse tensor's pieces may have other lengths next time: nothing can be learnt.
bool gives_composite(const std::vector<IValue>& values) {
  return std::any_of(values.begin(), values.end(),
                     [](const IValue& value) { return value.isTensor() && is_composite(value.toTensor()); });
}

// True if the driver's kernel gave this out= argument another shape. (A conjugated argument comes back as a
// copy, which says nothing.)
bool was_resized(const Tensor& mine, const IValue& returned) {
  if (!returned.isTensor() || !returned.toTensor().defined()) return false;
  const Tensor& theirs = returned.toTensor();
  if (!mine.has_storage() || !theirs.has_storage()) return false;
  return theirs.is_alias_of(mine) && (mine.sizes() != theirs.sizes() || mine.strides() != theirs.strides());
}

// What a synchronous execution told about the results of all later ones.
void learn_results(const OperatorInfo& info, Arguments arguments, const std::vector<IValue>& values,
                   c10::ArrayRef<Tensor> device_arguments, CallTemplate& entry) {
  const auto describe = [&](const Tensor& tensor) {
    return describe_output(tensor, device_arguments, tensor.defined() ? tensor.storage().nbytes() : 0);
  };
  for (size_t i = 0; i < info.returns.size(); i++) {
    Result& result = entry.results.emplace_back();
    if (info.returns[i].written) {
      const IValue& written = arguments[static_cast<size_t>(info.returns[i].alias)];
      if (!written.isTensor() || !was_resized(written.toTensor(), values[i])) continue;
      const Tensor& theirs = values[i].toTensor();
      for (size_t k = 0; k < device_arguments.size(); k++)
        if (device_arguments[k].is_same(written.toTensor()))
          entry.resizes.push_back({k, theirs.sizes().vec(), theirs.strides().vec()});
      continue;
    }
    if (values[i].isTensorList()) {
      result.kind = Result::Kind::kTensorList;
      for (const Tensor& tensor : values[i].toTensorVector()) result.outputs.push_back(describe(tensor));
    } else {
      result.kind = Result::Kind::kTensor;
      result.outputs.push_back(describe(values[i].isTensor() ? values[i].toTensor() : Tensor()));
    }
  }
  summarise(entry);
}

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, const OperatorInfo& info, Arguments arguments)
      : op_(op),
        info_(info),
        arguments_(arguments),
        device_(device_of(info, arguments)),
        log_(log_for(device_)) {}

  c10::SmallVector<IValue, 4> run() {
    raise_if_failed(log_);
    encode_call(info_, arguments_, log_, *lease_);
    timer_.finish(&Statistics::encode_ticks);
    const std::vector<uint64_t>& key = (*lease_).key;
    hash_ = hash_words(key);
    if (const CallTemplate* known = find_template(key, hash_)) {
      count(&Statistics::hits);
      timer_.finish(&Statistics::lookup_ticks);
      if (known->constant) return {*known->constant};
      return known->synchronous ? run_sync(*known, nullptr) : run_async(*known);
    }
    return run_first();
  }

 private:
  c10::SmallVector<IValue, 4> run_first() {
    count(&Statistics::misses);
    check_written_arguments(info_, arguments_);
    auto entry = std::make_unique<CallTemplate>();
    entry->key = (*lease_).key;
    const Plan plan = plan_call(op_, info_, arguments_, *entry);
    entry->synchronous = plan != Plan::kAsync;
    publish(log_, info_, *lease_, *entry);
    if (plan == Plan::kAsync) return run_async(*keep_template(std::move(entry), hash_));
    if (plan == Plan::kLearn || info_.constant) {
      CallTemplate& learning = *entry;
      return run_sync(learning, std::move(entry));
    }
    return run_sync(*keep_template(std::move(entry), hash_), nullptr);
  }

  c10::SmallVector<IValue, 4> run_async(const CallTemplate& entry) {
    std::vector<Tensor> device_arguments;
    if (entry.needs_arguments) device_arguments = device_tensors(arguments_);
    const uint64_t first_handle = entry.fresh != 0 ? new_handles(entry.fresh) : 0;
    uint64_t next_handle = first_handle;
    c10::SmallVector<IValue, 4> results;
    for (size_t i = 0; i < info_.returns.size(); i++) {
      if (entry.results[i].kind == Result::Kind::kWrittenArgument) {
        results.push_back(arguments_[static_cast<size_t>(info_.returns[i].alias)]);
      } else {
        results.push_back(make_result(entry.results[i], device_arguments, device_, next_handle));
      }
    }
    timer_.finish(&Statistics::output_ticks);
    const std::vector<uint64_t>& values = (*lease_).values;
    append(log_, Kind::kOperator, entry.dictionary_offset, values.size() + entry.fresh, [&](uint64_t* body) {
      std::copy(values.begin(), values.end(), body);
      for (size_t i = 0; i < entry.fresh; i++) body[values.size() + i] = first_handle + i;
    });
    for (const Resize& resize : entry.resizes)
      resize_tensor(device_arguments[resize.argument], resize.sizes, resize.strides, /*record=*/false);
    timer_.finish(&Statistics::append_ticks);
    return results;
  }

  // `learning` is the entry itself if its results are to be kept for later calls.
  c10::SmallVector<IValue, 4> run_sync(const CallTemplate& entry, std::unique_ptr<CallTemplate> learning) {
    count(&Statistics::synchronous);
    const std::vector<Tensor> device_arguments = device_tensors(arguments_);
    const uint64_t base = new_handles(kHandlesPerSyncCall);
    const std::vector<uint64_t>& sent = (*lease_).values;
    std::vector<IValue> values;
    call(
        log_, Kind::kOperatorSync, entry.dictionary_offset, sent.size() + 1,
        [&](uint64_t* body) { *std::copy(sent.begin(), sent.end(), body) = base; },
        [&](const uint8_t* payload, size_t bytes) {
          values = decode_reply(payload, bytes, device_arguments, device_);
        });
    TORCH_CHECK(values.size() == info_.returns.size(), "the device server returned ", values.size(),
                " values for ", info_.name, ", which has ", info_.returns.size());
    if (learning) keep_learned(std::move(learning), values, device_arguments);
    for (size_t i = 0; i < values.size(); i++)
      if (info_.returns[i].written) values[i] = written_argument(i, values[i]);
    return {values.begin(), values.end()};
  }

  void keep_learned(std::unique_ptr<CallTemplate> entry, const std::vector<IValue>& values,
                    c10::ArrayRef<Tensor> device_arguments) {
    if (info_.constant) {
      entry->constant = values[0];
    } else if (!gives_composite(values)) {
      learn_results(info_, arguments_, values, device_arguments, *entry);
      entry->synchronous = false;
      publish(log_, info_, *lease_, *entry);
    }
    keep_template(std::move(entry), hash_);
  }

  // The server's kernel may have resized an out= argument: do as it did.
  IValue written_argument(size_t result, const IValue& returned) const {
    const IValue& argument = arguments_[static_cast<size_t>(info_.returns[result].alias)];
    if (argument.isTensor() && was_resized(argument.toTensor(), returned))
      resize_tensor(argument.toTensor(), returned.toTensor().sizes(), returned.toTensor().strides(),
                    /*record=*/false);
    return argument;
  }

  StageTimer timer_;
  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  const Arguments arguments_;
  const c10::DeviceIndex device_;
  LogWriter& log_;
  EncodingLease lease_;
  uint64_t hash_ = 0;
};

}  // namespace

void forward_call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const BelowAutograd guard;
  const OperatorInfo& info = operator_info(op);
  const Arguments arguments = torch::jit::last(*stack, info.writes.size());
  auto results = OperatorCall(op, info, arguments).run();
  torch::jit::drop(*stack, info.writes.size());
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace understudy::client
