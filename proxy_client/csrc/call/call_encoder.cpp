#include "proxy_client/csrc/call/call_encoder.h"

#include "proxy_client/csrc/call/below_autograd.h"
#include "proxy_client/csrc/device/generators.h"
#include "proxy_client/csrc/operators/device_check.h"

namespace understudy::client {

using c10::IValue;
using replay::Tag;

void CallEncoder::generator(const std::optional<at::Generator>& generator) {
  put(Tag::kGenerator);
  values_.push(
      as_device_generator(generator ? *generator : default_generator(bound_device())).announce(log_));
}

// What the schema announces is looked for first; Python may pass other things too (a scalar for a tensor).
void CallEncoder::boxed(ArgumentKind kind, const IValue& value) {
  switch (kind) {
    case ArgumentKind::kTensor:
      if (C10_LIKELY(value.isTensor())) return tensor(value.toTensor());
      break;
    case ArgumentKind::kTensorList:
      if (C10_LIKELY(value.isTensorList())) return boxed_tensors(Tag::kTensorList, value.toListRef());
      break;
    case ArgumentKind::kInt:
      if (C10_LIKELY(value.isInt())) return integer(value.toInt());
      break;
    case ArgumentKind::kIntList:
      if (C10_LIKELY(value.isIntList())) return boxed_integers(value);
      break;
    case ArgumentKind::kNumber:
      if (value.isDouble()) return number(value.toDouble());
      break;
    case ArgumentKind::kBool:
      if (C10_LIKELY(value.isBool())) return boolean(value.toBool());
      break;
    case ArgumentKind::kOther:
      break;
  }
  boxed(value);
}

void CallEncoder::boxed(const IValue& value) {
  if (value.isNone()) return none();
  if (value.isInt()) return integer(value.toInt());
  if (value.isTensor()) return tensor(value.toTensor());
  if (value.isDouble()) return number(value.toDouble());
  if (value.isBool()) return boolean(value.toBool());
  if (value.isIntList()) return boxed_integers(value);
  if (value.isTensorList()) return boxed_tensors(Tag::kTensorList, value.toListRef());
  if (value.isOptionalTensorList()) return boxed_tensors(Tag::kOptionalTensorList, value.toListRef());
  if (value.isDevice()) return device(value.toDevice());
  if (value.isGenerator()) return generator(value.toGenerator());
  if (value.isDoubleList()) {
    const auto items = value.toListRef();
    put(Tag::kDoubleList, items.size());
    for (const IValue& item : items) values_.push(std::bit_cast<uint64_t>(item.toDouble()));
    return;
  }
  if (value.isBoolList()) {
    const auto items = value.toListRef();
    put(Tag::kBoolList, items.size());
    for (const IValue& item : items) key_.push(item.toBool());
    return;
  }
  if (value.isString()) return string(value.toStringRef());
  if (value.isComplexDouble()) return complex(value.toComplexDouble());
  if (value.isList()) {
    const auto items = value.toListRef();
    put(Tag::kList, items.size());
    for (const IValue& item : items) boxed(item);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the virtual device cannot forward an argument of kind ",
                              value.tagKind());
}

void CallEncoder::boxed_integers(const IValue& list) {
  const auto items = list.toListRef();
  uint64_t* words = key_.extend(1 + items.size());
  *words++ = key_word(Tag::kIntList, items.size());
  for (const IValue& item : items) *words++ = static_cast<uint64_t>(item.toInt());
}

void CallEncoder::boxed_tensors(Tag tag, c10::ArrayRef<IValue> items) {
  put(tag, items.size());
  for (const IValue& item : items) {
    if (item.isNone()) {
      undefined();
    } else {
      tensor(item.toTensor());
    }
  }
}

// By value: index tensors, wrapped numbers, scalars.
void CallEncoder::host_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return undefined();
  const BelowAutograd guard;
  TORCH_CHECK(tensor.device().is_cpu(), "Expected all tensors to be on the same device, but found ",
              tensor.device(), " and cuda");
  const bool fits = tensor.nbytes() <= kMaxHostTensorBytes;  // else check_devices() will refuse it
  const at::Tensor dense = fits ? tensor.resolve_conj().resolve_neg().contiguous() : tensor;
  key_.push(tensor_word(Tag::kCpuTensor, *dense.unsafeGetTensorImpl(),
                        static_cast<uint64_t>(tensor.scalar_type())) |
            (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? replay::kWrappedNumber << 24 : 0));
  for (const int64_t size : tensor.sizes()) key_.push(static_cast<uint64_t>(size));
  if (fits) values_.push_bytes(dense.const_data_ptr(), dense.nbytes());
}

void CallEncoder::device(c10::Device device) {
  TORCH_CHECK(device.is_cuda() || device.is_cpu(), "the virtual device cannot forward a call for device ",
              device);
  put(device.is_cuda() ? Tag::kDevice : Tag::kCpuDevice);
}

}  // namespace understudy::client
