#include "proxy_client/csrc/shapes/server_reply.h"

#include <ATen/ATen.h>

#include <bit>

#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/device/virtual_memory.h"
#include "proxy_client/csrc/nested/nested_tensor.h"
#include "proxy_client/csrc/sparse/sparse_tensor.h"
#include "replay/csrc/log/log_format.h"

namespace understudy::client {
namespace {

using replay::Tag;

class ReplyReader {
 public:
  ReplyReader(const uint8_t* payload, size_t bytes, c10::ArrayRef<at::Tensor> device_arguments,
              c10::DeviceIndex device)
      : next_(reinterpret_cast<const uint64_t*>(payload)),
        end_(next_ + bytes / 8),
        arguments_(device_arguments),
        device_(device) {}

  std::vector<c10::IValue> read() {
    std::vector<c10::IValue> values(take());
    for (c10::IValue& result : values) result = value();
    return values;
  }

 private:
  uint64_t take() {
    TORCH_CHECK(next_ < end_, "the device server's reply is too short");
    return *next_++;
  }
  Tag peek() const {
    TORCH_CHECK(next_ < end_, "the device server's reply is too short");
    return static_cast<Tag>(*next_ & 255);
  }

  c10::IValue value() {
    switch (peek()) {
      case Tag::kTensor:
      case Tag::kUndefined:
      case Tag::kSparse:
      case Tag::kSparseCompressed:
      case Tag::kNested:
        return tensor();
      case Tag::kTensorList: {
        c10::List<at::Tensor> list;
        for (uint64_t n = take() >> 8; n > 0; n--) list.push_back(tensor());
        return list;
      }
      case Tag::kInt:
        take();
        return static_cast<int64_t>(take());
      case Tag::kBool:
        return (take() >> 8) != 0;
      case Tag::kDouble:
        take();
        return std::bit_cast<double>(take());
      default:
        take();
        return {};
    }
  }

  at::Tensor tensor() {
    switch (peek()) {
      case Tag::kUndefined:
        take();
        return {};
      case Tag::kSparse:
        return sparse();
      case Tag::kSparseCompressed:
        return sparse_compressed();
      case Tag::kNested:
        return nested();
      default:
        return dense();
    }
  }

  c10::IntArrayRef take_sizes(size_t dims) {
    TORCH_CHECK(static_cast<size_t>(end_ - next_) >= dims, "the device server's reply is too short");
    const c10::IntArrayRef sizes{reinterpret_cast<const int64_t*>(next_), dims};
    next_ += dims;
    return sizes;
  }

  at::Tensor sparse() {
    const uint64_t word = take();
    const c10::IntArrayRef sizes = take_sizes(word >> 16 & 255);
    const bool coalesced = take() != 0;
    const at::Tensor indices = dense();
    return make_sparse(static_cast<int64_t>(word >> 24 & 255), sizes, indices, dense(), coalesced);
  }

  at::Tensor sparse_compressed() {
    const uint64_t word = take();
    const c10::IntArrayRef sizes = take_sizes(word >> 16 & 255);
    const at::Tensor compressed_indices = dense(), plain_indices = dense();
    return make_sparse_compressed(static_cast<c10::Layout>(word >> 24 & 255), sizes, compressed_indices,
                                  plain_indices, dense());
  }

  at::Tensor nested() {
    const uint64_t word = take(), components = take(), dims = word >> 16 & 255;
    const at::Tensor buffer = dense();
    TORCH_CHECK(components <= static_cast<size_t>(end_ - next_), "the device server's reply is too short");
    const c10::IntArrayRef words = take_sizes(components * (2 * dims + 1));
    return make_nested(buffer,
                       read_nested_shape(reinterpret_cast<const uint64_t*>(words.data()),
                                         static_cast<int64_t>(components), static_cast<int64_t>(dims)));
  }

  at::Tensor dense() {
    const uint64_t word = take();
    TORCH_CHECK(static_cast<Tag>(word & 255) == Tag::kTensor, "the device server's reply makes no sense");
    const auto dims = static_cast<size_t>(word >> 16 & 255);
    const uint64_t handle = take();
    Layout layout{static_cast<c10::ScalarType>(word >> 8 & 255), static_cast<int64_t>(take()), {}, {}};
    const uint64_t bytes = take();
    layout.sizes = take_sizes(dims);
    layout.strides = take_sizes(dims);
    const uint64_t flags = word >> 24;
    if ((flags & replay::kFresh) != 0)
      return with_flags(make_tensor(make_storage(bytes, device_, handle), layout), flags);
    for (const at::Tensor& argument : arguments_)
      if (locate(argument).handle == handle) {
        c10::StorageImpl& storage = *argument.storage().unsafeGetStorageImpl();
        if (bytes > storage.nbytes()) resize_storage(storage, bytes, /*record=*/false);
        return with_flags(make_tensor(argument.storage(), layout), flags);
      }
    TORCH_CHECK(false, "the device server's reply names a buffer that is not an argument of the call");
  }

  static at::Tensor with_flags(at::Tensor made, uint64_t flags) {
    if ((flags & (replay::kConjugate | replay::kNegative)) != 0) set_lazy_flags(made, flags);
    return made;
  }

  const uint64_t* next_;
  const uint64_t* end_;
  c10::ArrayRef<at::Tensor> arguments_;
  c10::DeviceIndex device_;
};

}  // namespace

std::vector<c10::IValue> decode_reply(const uint8_t* payload, size_t bytes,
                                      c10::ArrayRef<at::Tensor> device_arguments, c10::DeviceIndex device) {
  return ReplyReader(payload, bytes, device_arguments, device).read();
}

}  // namespace understudy::client
