#include "proxy_client/csrc/sparse/sparse_call.h"

#include <ATen/ATen.h>

#include "proxy_client/csrc/call/below_autograd.h"
#include "proxy_client/csrc/call/call_encoding.h"
#include "proxy_client/csrc/call/thread_state.h"
#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/device/device.h"
#include "proxy_client/csrc/nested/nested_tensor.h"
#include "proxy_client/csrc/operators/device_check.h"
#include "proxy_client/csrc/shapes/server_reply.h"
#include "proxy_client/csrc/shapes/shape_cache.h"
#include "proxy_client/csrc/sparse/sparse_tensor.h"
#include "proxy_client/csrc/statistics.h"
#include "replay/csrc/log/handles.h"

namespace understudy::client {
namespace {

using at::Tensor;
using c10::IValue;
using replay::Tag;
using Arguments = c10::ArrayRef<IValue>;

bool is_list(const IValue& value) { return value.isTensorList() || value.isOptionalTensorList(); }

template <class Visit>
void for_each_tensor(const IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (is_list(value)) {
    for (const IValue& item : value.toListRef())
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor());
  }
}

bool holds_composite(const IValue& value) {
  bool found = false;
  for_each_tensor(value, [&](const Tensor& tensor) { found = found || is_composite(tensor); });
  return found;
}

// The dense cuda tensors that the arguments consist of.
std::vector<Tensor> dense_arguments(Arguments arguments) {
  std::vector<Tensor> found;
  for (const IValue& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      if (!is_composite(tensor)) {
        found.push_back(tensor);
      } else {
        for (Tensor& piece : pieces(tensor)) found.push_back(std::move(piece));
      }
    });
  return found;
}

// Sizes are key; the pieces, whose length changes from call to call, are values.
void encode_nested(const Tensor& tensor, Encoding& out) {
  const NestedShape shape = shape_of_nested(tensor);
  out.key.push(static_cast<uint64_t>(Tag::kNested) | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
               static_cast<uint64_t>(shape.dims()) << 16);
  out.values.push(static_cast<uint64_t>(shape.components()));
  append_raw_tensor(buffer_of_nested(tensor), out.values);
  append_nested_shape(shape, out.values);
}

void encode_composite(const Tensor& tensor, Encoding& out) {
  TORCH_CHECK(tensor.is_cuda(), "Expected all tensors to be on the same device, but found a ",
              tensor.layout(), " tensor on ", tensor.device(), " and others on cuda");
  if (tensor.is_nested()) return encode_nested(tensor, out);
  const std::vector<Tensor> parts = pieces(tensor);
  const uint64_t kind = tensor.is_sparse() ? static_cast<uint64_t>(tensor.sparse_dim())
                                           : static_cast<uint64_t>(tensor.layout());
  const Tag tag = tensor.is_sparse() ? Tag::kSparse : Tag::kSparseCompressed;
  out.key.push(static_cast<uint64_t>(tag) | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
               static_cast<uint64_t>(tensor.dim()) << 16 | kind << 24);
  for (const int64_t size : tensor.sizes()) out.key.push(static_cast<uint64_t>(size));
  if (tensor.is_sparse()) out.values.push(tensor.is_coalesced() ? 1 : 0);
  for (const Tensor& part : parts) append_raw_tensor(part, out.values);
}

class SparseCall {
 public:
  SparseCall(const c10::OperatorHandle& op, const OperatorInfo& info, Arguments arguments)
      : op_(op), info_(info), arguments_(arguments), log_(log_for(bound_device())) {
    TORCH_CHECK(arguments.size() == op.schema().arguments().size());
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!info.writes[i]) continue;
      for_each_tensor(arguments[i], [&](const Tensor& tensor) {
        TORCH_CHECK(tensor.is_cuda(), info.name,
                    ": Expected all tensors to be on the same device, but it would write to a tensor on ",
                    tensor.device(), " with arguments on cuda");
        if (is_composite(tensor)) written_.push_back(tensor);
        writes_ = true;
      });
    }
  }

  c10::SmallVector<IValue, 4> run() {
    raise_if_failed(log_);
    encode();
    const CallTemplate& entry = find_or_make_template();
    return entry.synchronous ? run_sync(entry) : run_async(entry);
  }

 private:
  void encode() {
    Encoding& out = *lease_;
    out.key.clear();
    out.values.clear();
    out.key.push(reinterpret_cast<uintptr_t>(&info_));
    for (size_t i = 0; i < arguments_.size(); i++) {
      const IValue& argument = arguments_[i];
      if (!holds_composite(argument)) {
        encode_argument(info_, i, argument, log_, out);
      } else if (argument.isTensor()) {
        encode_composite(argument.toTensor(), out);
      } else {
        encode_list(i, argument, out);
      }
    }
  }

  void encode_list(size_t index, const IValue& list, Encoding& out) {
    const auto items = list.toListRef();
    const Tag tag = list.isTensorList() ? Tag::kTensorList : Tag::kOptionalTensorList;
    out.key.push(static_cast<uint64_t>(tag) | items.size() << 8);
    for (const IValue& item : items) {
      if (item.isTensor() && is_composite(item.toTensor())) {
        encode_composite(item.toTensor(), out);
      } else {
        encode_argument(info_, index, item.isNone() ? IValue(Tensor()) : item, log_, out);
      }
    }
  }

  const CallTemplate& find_or_make_template() {
    const WordBuffer& key = (*lease_).key;
    if (const CallTemplate* known = thread_.templates.find(key)) {
      count(&Statistics::hits);
      return *known;
    }
    count(&Statistics::misses);
    check_devices(op_, info_, arguments_);
    auto entry = c10::make_intrusive<CallTemplate>();
    entry->key.assign(key.data(), key.data() + key.size());
    entry->synchronous = !writes_ || !info_.returns_written || info_.has_out || !written_.empty();
    if (!entry->synchronous) entry->results.resize(info_.returns.size());
    publish(log_, *entry);
    return *thread_.templates.keep(std::move(entry));
  }

  c10::SmallVector<IValue, 4> run_async(const CallTemplate& entry) {
    const WordBuffer& values = (*lease_).values;
    send_with_template(log_, entry, [&](uint64_t id) {
      append(log_, Kind::kOperator, id, values.size(),
             [&](uint64_t* body) { std::copy_n(values.data(), values.size(), body); });
    });
    c10::SmallVector<IValue, 4> results;
    for (const OperatorInfo::Return& result : info_.returns) results.push_back(argument_of(result));
    return results;
  }

  c10::SmallVector<IValue, 4> run_sync(const CallTemplate& entry) {
    count(&Statistics::synchronous);
    const std::vector<Tensor> known = dense_arguments(arguments_);
    const uint64_t base = new_handles(replay::kHandlesPerSyncCall);
    const WordBuffer& sent = (*lease_).values;
    std::vector<IValue> values;
    send_with_template(log_, entry, [&](uint64_t id) {
      call(
          log_, Kind::kOperatorSync, id, sent.size() + 1,
          [&](uint64_t* body) { *std::copy_n(sent.data(), sent.size(), body) = base; },
          [&](const uint8_t* payload, size_t bytes) {
            values = decode_reply(payload, bytes, known, bound_device());
          });
    });
    const size_t returned = info_.returns.size();
    TORCH_CHECK(values.size() == returned + written_.size(), "the device server returned ", values.size(),
                " values for ", info_.name, ", which has ", returned, " and changes ", written_.size(),
                " sparse arguments");
    for (size_t i = 0; i < written_.size(); i++)
      assign_composite(written_[i], values[returned + i].toTensor());
    c10::SmallVector<IValue, 4> results;
    for (size_t i = 0; i < returned; i++)
      results.push_back(info_.returns[i].written ? written_result(info_.returns[i], values[i]) : values[i]);
    return results;
  }

  const IValue& argument_of(const OperatorInfo::Return& result) const {
    return arguments_[static_cast<size_t>(result.alias)];
  }

  // The server's kernel may have resized a dense out= argument: do as it did.
  IValue written_result(const OperatorInfo::Return& result, const IValue& returned) const {
    const IValue& argument = argument_of(result);
    if (argument.isTensor() && returned.isTensor() && !is_composite(argument.toTensor())) {
      const Tensor &mine = argument.toTensor(), &theirs = returned.toTensor();
      if (mine.sizes() != theirs.sizes()) resize_tensor(mine, theirs.sizes(), theirs.strides(), false);
    }
    return argument;
  }

  StageTimer timer_;
  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  const Arguments arguments_;
  LogWriter& log_;
  ThreadState& thread_ = thread_state();
  EncodingLease lease_{thread_};
  std::vector<Tensor> written_;  // composites that the operator changes
  bool writes_ = false;
};

}  // namespace

void forward_sparse_call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const BelowAutograd guard;
  const OperatorInfo& info = operator_info(op);
  const Arguments arguments = torch::jit::last(*stack, info.writes.size());
  auto results = SparseCall(op, info, arguments).run();
  torch::jit::drop(*stack, info.writes.size());
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace understudy::client
