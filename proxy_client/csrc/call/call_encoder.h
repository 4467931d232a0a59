// Writes the arguments of one call into its encoding, one function per kind of argument. A boxed call
// (encode_call) and a typed one (direct_call.h) must give the same words: they share their templates.
#pragma once
#include <ATen/ATen.h>

#include <bit>
#include <string_view>

#include "proxy_client/csrc/call/call_encoding.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "proxy_client/csrc/settings.h"

namespace understudy::client {

constexpr int kPointerBits = 48;  // of a process's addresses

// The first word of a call's key: its operator, and the settings under which its results had their shape.
inline uint64_t key_head(const OperatorInfo& info) {
  return reinterpret_cast<uintptr_t>(&info) | settings_state() << kPointerBits;
}
inline const OperatorInfo& operator_of(uint64_t key_head) {
  return *reinterpret_cast<const OperatorInfo*>(key_head & ((1ull << kPointerBits) - 1));
}

inline uint64_t key_word(replay::Tag tag, uint64_t rest = 0) {
  return static_cast<uint64_t>(tag) | rest << 8;
}

inline uint64_t tensor_word(replay::Tag tag, const c10::TensorImpl& tensor, uint64_t dtype) {
  const uint64_t flags = (tensor.is_wrapped_number() ? replay::kWrappedNumber : 0) |
                         (tensor.is_conj() ? replay::kConjugate : 0) |
                         (tensor.is_neg() ? replay::kNegative : 0);
  return static_cast<uint64_t>(tag) | dtype << 8 | static_cast<uint64_t>(tensor.dim()) << 16 | flags << 24;
}

class CallEncoder {
 public:
  using Tag = replay::Tag;

  CallEncoder(Encoding& out, LogWriter& log, bool sized_by_numbers)
      : key_(out.key), values_(out.values), log_(log), sized_by_numbers_(sized_by_numbers) {}

  void none() { put(Tag::kNone); }
  void integer(int64_t value) { put(Tag::kInt, 0, static_cast<uint64_t>(value)); }
  void boolean(bool value) { put(Tag::kBool, value); }

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

  // Learning rates would defeat the shape cache, so doubles are values; but a factory's define its shape,
  // also when it writes to an out= argument (arange).
  void number(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    if (sized_by_numbers_) return put(Tag::kConstantDouble, 0, bits);
    put(Tag::kDouble);
    values_.push(bits);
  }

  void complex(c10::complex<double> value) {
    put(Tag::kComplex);
    values_.push(std::bit_cast<uint64_t>(value.real()));
    values_.push(std::bit_cast<uint64_t>(value.imag()));
  }

  void integers(c10::IntArrayRef items) {
    uint64_t* words = key_.extend(1 + items.size());
    *words++ = key_word(Tag::kIntList, items.size());
    for (const int64_t item : items) *words++ = static_cast<uint64_t>(item);
  }

  void string(std::string_view text) {
    put(Tag::kString, text.size());
    key_.push_bytes(text.data(), text.size());
  }

  void begin_list(Tag tag, size_t items) { put(tag, items); }
  void undefined() { put(Tag::kUndefined); }
  void word(uint64_t word) { key_.push(word); }

  // A missing generator means the device's default one: the driver's own default may be another.
  void generator(const std::optional<at::Generator>& generator);
  // Argument number `index` of an operator, by what it is.
  void argument(const OperatorInfo& info, size_t index, const c10::IValue& value) {
    if (C10_UNLIKELY(static_cast<int>(index) == info.generator))
      return generator(value.isGenerator() ? std::optional(value.toGenerator()) : std::nullopt);
    boxed(info.kinds[index], value);
  }

 private:
  void put(Tag tag, uint64_t rest = 0) { key_.push(key_word(tag, rest)); }
  void put(Tag tag, uint64_t rest, uint64_t next) {
    uint64_t* const words = key_.extend(2);
    words[0] = key_word(tag, rest);
    words[1] = next;
  }
  void boxed(ArgumentKind kind, const c10::IValue& value);
  void boxed(const c10::IValue& value);
  void boxed_integers(const c10::IValue& list);
  void boxed_tensors(Tag tag, c10::ArrayRef<c10::IValue> items);
  void host_tensor(const at::Tensor& tensor);
  void device(c10::Device device);

  WordBuffer& key_;
  WordBuffer& values_;
  LogWriter& log_;
  const bool sized_by_numbers_;
};

}  // namespace understudy::client
