#include "proxy_client/csrc/call/call_encoding.h"

#include <ATen/ATen.h>

#include "proxy_client/csrc/call/call_encoder.h"

namespace understudy::client {

using c10::IValue;
using replay::Tag;

void encode_call(const OperatorInfo& info, c10::ArrayRef<IValue> arguments, LogWriter& log, Encoding& out) {
  out.key.clear();
  out.values.clear();
  out.key.push(key_head(info));
  CallEncoder encoder(out, log, info.sized_by_numbers);
  for (size_t i = 0; i < arguments.size(); i++) encoder.argument(info, i, arguments[i]);
}

void encode_argument(const OperatorInfo& info, size_t index, const IValue& argument, LogWriter& log,
                     Encoding& out) {
  CallEncoder(out, log, info.sized_by_numbers).argument(info, index, argument);
}

void append_raw_tensor(const at::Tensor& tensor, WordBuffer& words) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto [handle, displacement] = locate(tensor);
  words.push(tensor_word(Tag::kTensor, impl, static_cast<uint64_t>(tensor.scalar_type())));
  words.push(handle);
  words.push(static_cast<uint64_t>(impl.storage_offset()) + displacement / impl.itemsize());
  for (const int64_t size : impl.sizes()) words.push(static_cast<uint64_t>(size));
  for (const int64_t stride : impl.strides()) words.push(static_cast<uint64_t>(stride));
}

std::vector<at::Tensor> device_tensors(c10::ArrayRef<IValue> arguments) {
  std::vector<at::Tensor> found;
  const auto take = [&](const IValue& value) {
    if (!value.isTensor()) return;
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.is_cuda()) found.push_back(tensor);
  };
  for (const IValue& argument : arguments) {
    if (argument.isTensorList() || argument.isOptionalTensorList()) {
      for (const IValue& item : argument.toListRef()) take(item);
    } else {
      take(argument);
    }
  }
  return found;
}

}  // namespace understudy::client
