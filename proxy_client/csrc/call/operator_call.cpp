#include "proxy_client/csrc/call/operator_call.h"

#include <ATen/ATen.h>

#include "proxy_client/csrc/call/pending_call.h"
#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "proxy_client/csrc/operators/custom_operators.h"

namespace understudy::client {
namespace {

using at::Tensor;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

// Tensors know their device by existing; only factories name one.
c10::DeviceIndex device_of(const OperatorInfo& info, Arguments arguments) {
  if (C10_LIKELY(!info.creates)) return bound_device();
  for (const IValue& argument : arguments)
    if (argument.isDevice() && argument.toDevice().is_cuda())
      return resolve_device(argument.toDevice()).index();
  return current_device();
}

Tensor make_fresh(const Output& output, c10::DeviceIndex device, uint64_t handle) {
  return make_tensor(make_storage(output.bytes, device, handle),
                     {output.dtype, output.offset, output.sizes, output.strides});
}

Tensor make_plain_output(const Output& output, c10::ArrayRef<Tensor> device_arguments,
                         c10::DeviceIndex device, uint64_t& next_handle) {
  switch (output.origin) {
    case Output::Origin::kUndefined:
      return {};
    case Output::Origin::kArgument:
      return device_arguments[output.argument];
    case Output::Origin::kView:
      return make_tensor(device_arguments[output.argument].storage(),
                         {output.dtype, output.offset, output.sizes, output.strides});
    case Output::Origin::kFresh:
      break;
  }
  return make_fresh(output, device, next_handle++);
}

Tensor make_output(const Output& output, c10::ArrayRef<Tensor> device_arguments, c10::DeviceIndex device,
                   uint64_t& next_handle) {
  Tensor made = make_plain_output(output, device_arguments, device, next_handle);
  if (C10_UNLIKELY(output.flags != 0)) set_lazy_flags(made, output.flags);
  return made;
}

}  // namespace

void run_async(const PendingCall& call, const CallTemplate& entry, Results& results) {
  std::vector<Tensor> device_arguments;
  if (C10_UNLIKELY(entry.needs_arguments)) device_arguments = device_tensors(call.arguments);
  need_room(entry.fresh_bytes, call.device);
  const uint64_t first_handle = entry.fresh != 0 ? new_handles(entry.fresh) : 0;
  uint64_t next_handle = first_handle;
  for (size_t i = 0; i < entry.results.size(); i++) {
    const Result& result = entry.results[i];
    if (result.kind == Result::Kind::kTensor) {
      results.emplace_back(make_output(result.outputs[0], device_arguments, call.device, next_handle));
    } else if (result.kind == Result::Kind::kWrittenArgument) {
      results.push_back(call.arguments[static_cast<size_t>(call.info.returns[i].alias)]);
    } else if (result.kind == Result::Kind::kNumber) {
      results.emplace_back(result.number);
    } else {
      c10::List<Tensor> list;
      list.reserve(result.outputs.size());
      for (const Output& output : result.outputs)
        list.push_back(make_output(output, device_arguments, call.device, next_handle));
      results.emplace_back(std::move(list));
    }
  }
  call.timer.finish(&Statistics::output_ticks);
  append_operator(call.log, entry, call.encoding.values, first_handle);
  for (const Resize& resize : entry.resizes) {
    resize_tensor(device_arguments[resize.argument], resize.sizes, resize.strides, /*record=*/false);
    set_lazy_flags(device_arguments[resize.argument], resize.flags);
  }
  call.timer.finish(&Statistics::append_ticks);
}

std::vector<std::pair<std::string, bool>>& direct_operators() {
  static std::vector<std::pair<std::string, bool>> rows;
  return rows;
}

void forward_call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  StageTimer timer;
  ThreadState& thread = thread_state();
  const OperatorInfo& info = thread.operators.find(op);
  if (C10_UNLIKELY(info.custom) && run_custom_operator_here(op, stack)) return;
  const Arguments arguments = torch::jit::last(*stack, info.kinds.size());
  const c10::DeviceIndex device = device_of(info, arguments);
  LogWriter& log = log_for(device);
  raise_if_failed(log);
  EncodingLease lease(thread);
  Encoding& encoding = *lease;
  encode_call(info, arguments, log, encoding);
  timer.finish(&Statistics::encode_ticks);
  const CallTemplate* const known = thread.templates.find(encoding.key);
  timer.finish(&Statistics::lookup_ticks);

  const PendingCall call{op, info, arguments, device, log, thread, encoding, timer};
  Results results;
  if (C10_UNLIKELY(!known)) {
    run_first(call, results);
  } else {
    count(&Statistics::hits);
    if (C10_LIKELY(!known->synchronous)) {
      run_async(call, *known, results);
    } else if (known->constant) {
      results.push_back(*known->constant);
    } else {
      run_sync(call, *known, results);
    }
  }
  torch::jit::drop(*stack, info.kinds.size());
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace understudy::client
