#include "proxy_client/csrc/call_encoding.h"

#include <ATen/ATen.h>

#include <bit>

#include "proxy_client/csrc/below_autograd.h"
#include "proxy_client/csrc/client_tensor.h"
#include "proxy_client/csrc/generators.h"
#include "proxy_client/csrc/virtual_memory.h"

namespace understudy::client {
namespace {

using c10::IValue;
using replay::Tag;

constexpr int64_t kMaxCpuTensorBytes = 512 << 10;  // a record holds 1 MiB

uint64_t word(Tag tag, uint64_t rest = 0) { return static_cast<uint64_t>(tag) | rest << 8; }

uint64_t tensor_word(Tag tag, const c10::TensorImpl& tensor, uint64_t dtype) {
  const uint64_t flags = (tensor.is_wrapped_number() ? replay::kWrappedNumber : 0) |
                         (tensor.is_conj() ? replay::kConjugate : 0) |
                         (tensor.is_neg() ? replay::kNegative : 0);
  return static_cast<uint64_t>(tag) | dtype << 8 | static_cast<uint64_t>(tensor.dim()) << 16 | flags << 24;
}

class CallEncoder {
 public:
  CallEncoder(Encoding& out, LogWriter& log, bool sized_by_numbers)
      : key_(out.key), values_(out.values), log_(log), sized_by_numbers_(sized_by_numbers) {}

  // What the schema announces is looked for first; Python may pass other things too (a scalar for a tensor).
  void encode(ArgumentKind kind, const IValue& value) {
    switch (kind) {
      case ArgumentKind::kTensor:
        if (C10_LIKELY(value.isTensor())) return tensor(value.toTensor());
        break;
      case ArgumentKind::kTensorList:
        if (C10_LIKELY(value.isTensorList())) return tensor_list(Tag::kTensorList, value.toListRef());
        break;
      case ArgumentKind::kInt:
        if (C10_LIKELY(value.isInt())) return put(Tag::kInt, 0, static_cast<uint64_t>(value.toInt()));
        break;
      case ArgumentKind::kIntList:
        if (C10_LIKELY(value.isIntList())) return int_list(value);
        break;
      case ArgumentKind::kNumber:
        if (value.isDouble()) return number(value.toDouble());
        break;
      case ArgumentKind::kBool:
        if (C10_LIKELY(value.isBool())) return put(Tag::kBool, value.toBool());
        break;
      case ArgumentKind::kOther:
        break;
    }
    encode(value);
  }

  void encode(const IValue& value) {
    if (value.isNone()) return put(Tag::kNone);
    if (value.isInt()) return put(Tag::kInt, 0, static_cast<uint64_t>(value.toInt()));
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isDouble()) return number(value.toDouble());
    if (value.isBool()) return put(Tag::kBool, value.toBool());
    if (value.isIntList()) return int_list(value);
    if (value.isTensorList()) return tensor_list(Tag::kTensorList, value.toListRef());
    if (value.isOptionalTensorList()) return tensor_list(Tag::kOptionalTensorList, value.toListRef());
    if (value.isDevice()) return device(value.toDevice());
    if (value.isGenerator()) return generator(value.toGenerator());
    if (value.isDoubleList()) return double_list(value);
    if (value.isBoolList()) return bool_list(value);
    if (value.isString()) return string(value.toStringRef());
    if (value.isComplexDouble()) return complex(value.toComplexDouble());
    if (value.isList()) return list(value.toListRef());
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the virtual device cannot forward an argument of kind ",
                                value.tagKind());
  }

  // A missing generator means the device's default one: say so, the driver's own default may be another.
  void argument(const OperatorInfo& info, size_t index, const IValue& value) {
    if (C10_UNLIKELY(static_cast<int>(index) == info.generator) && !value.isGenerator())
      return generator(default_generator(bound_device()));
    encode(info.kinds[index], value);
  }

 private:
  void generator(const at::Generator& generator) {
    put(Tag::kGenerator);
    values_.push(as_device_generator(generator).announce(log_));
  }

  void put(Tag tag, uint64_t rest = 0) { key_.push(word(tag, rest)); }
  void put(Tag tag, uint64_t rest, uint64_t next) {
    uint64_t* const words = key_.extend(2);
    words[0] = word(tag, rest);
    words[1] = next;
  }

  void tensor(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (C10_UNLIKELY(!impl.is_cuda())) return host_tensor(tensor);
    const auto [handle, displacement] = locate(tensor);
    values_.push(handle);
    const auto sizes = impl.sizes(), strides = impl.strides();
    const size_t n = sizes.size();
    uint64_t* const words = key_.extend(2 + 2 * n);
    words[0] = tensor_word(Tag::kTensor, impl, static_cast<uint64_t>(tensor.scalar_type()));
    words[1] = static_cast<uint64_t>(impl.storage_offset());
    if (C10_UNLIKELY(displacement != 0)) words[1] += displacement / impl.itemsize();
    for (size_t i = 0; i < n; i++) {
      words[2 + i] = static_cast<uint64_t>(sizes[i]);
      words[2 + n + i] = static_cast<uint64_t>(strides[i]);
    }
  }

  // By value: index tensors, wrapped numbers, scalars.
  void host_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return put(Tag::kUndefined);
    const BelowAutograd guard;
    TORCH_CHECK(tensor.device().is_cpu(), "Expected all tensors to be on the same device, but found ",
                tensor.device(), " and cuda");
    const at::Tensor dense = tensor.resolve_conj().resolve_neg().contiguous();
    TORCH_CHECK_NOT_IMPLEMENTED(static_cast<int64_t>(dense.nbytes()) <= kMaxCpuTensorBytes,
                                "a CPU tensor of ", dense.nbytes(),
                                " bytes is an argument of a cuda operator; move it to the device first");
    key_.push(tensor_word(Tag::kCpuTensor, *dense.unsafeGetTensorImpl(),
                          static_cast<uint64_t>(tensor.scalar_type())) |
              (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? replay::kWrappedNumber << 24 : 0));
    for (const int64_t size : tensor.sizes()) key_.push(static_cast<uint64_t>(size));
    values_.push_bytes(dense.const_data_ptr(), dense.nbytes());
  }

  // Learning rates would defeat the shape cache, so doubles are values; but a factory's define its shape,
  // also when it writes to an out= argument (arange).
  void number(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    if (sized_by_numbers_) return put(Tag::kConstantDouble, 0, bits);
    put(Tag::kDouble);
    values_.push(bits);
  }

  void int_list(const IValue& value) {
    const auto items = value.toListRef();
    uint64_t* words = key_.extend(1 + items.size());
    *words++ = word(Tag::kIntList, items.size());
    for (const IValue& item : items) *words++ = static_cast<uint64_t>(item.toInt());
  }

  void tensor_list(Tag tag, c10::ArrayRef<IValue> items) {
    put(tag, items.size());
    for (const IValue& item : items) {
      if (item.isNone()) {
        put(Tag::kUndefined);
      } else {
        tensor(item.toTensor());
      }
    }
  }

  void device(c10::Device device) {
    TORCH_CHECK(device.is_cuda() || device.is_cpu(), "the virtual device cannot forward a call for device ",
                device);
    put(device.is_cuda() ? Tag::kDevice : Tag::kCpuDevice);
  }

  void double_list(const IValue& value) {
    const auto items = value.toDoubleList();
    put(Tag::kDoubleList, items.size());
    for (size_t i = 0; i < items.size(); i++) values_.push(std::bit_cast<uint64_t>(items.get(i)));
  }

  void bool_list(const IValue& value) {
    const auto items = value.toBoolList();
    put(Tag::kBoolList, items.size());
    for (size_t i = 0; i < items.size(); i++) key_.push(items.get(i));
  }

  void string(const std::string& text) {
    put(Tag::kString, text.size());
    key_.push_bytes(text.data(), text.size());
  }

  void complex(c10::complex<double> value) {
    put(Tag::kComplex);
    values_.push(std::bit_cast<uint64_t>(value.real()));
    values_.push(std::bit_cast<uint64_t>(value.imag()));
  }

  void list(c10::ArrayRef<IValue> items) {
    put(Tag::kList, items.size());
    for (const IValue& item : items) encode(item);
  }

  WordBuffer& key_;
  WordBuffer& values_;
  LogWriter& log_;
  const bool sized_by_numbers_;
};

}  // namespace

void encode_call(const OperatorInfo& info, c10::ArrayRef<IValue> arguments, LogWriter& log, Encoding& out) {
  out.key.clear();
  out.values.clear();
  out.key.push(reinterpret_cast<uintptr_t>(&info));
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
