// What a buffer holds: a storage, and the tensors made over it so far.
//
// The tensors live and die with the storage: a pre-image, a resize or a restored buffer brings a storage of
// its own, so a tensor can never be found over memory that its handle does not name any more.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <array>

namespace understudy::server {

class Content {
 public:
  Content() = default;
  Content(c10::Storage storage) : storage_(std::move(storage)) {}  // implicit: a storage without tensors yet
  Content& operator=(c10::Storage storage) {
    views_ = {};
    storage_ = std::move(storage);
    return *this;
  }

  operator const c10::Storage&() const { return storage_; }
  const c10::Storage& storage() const { return storage_; }
  size_t nbytes() const { return storage_.nbytes(); }

  // The tensor made earlier with these very metadata, or null. They are known by their TensorSpec's serial.
  const at::Tensor* find(uint64_t spec) const {
    for (const View& view : views_)
      if (view.spec == spec) return &view.tensor;
    return nullptr;
  }
  const at::Tensor& keep(uint64_t spec, at::Tensor tensor) {
    View& view = views_[next_++ % kViews];
    view = {spec, std::move(tensor)};
    return view.tensor;
  }
  void forget(uint64_t spec) {
    for (View& view : views_)
      if (view.spec == spec) view = {};
  }
  // Gives up the tensors and hands out the storage.
  c10::Storage release() {
    views_ = {};
    return std::move(storage_);
  }

 private:
  static constexpr size_t kViews = 4;  // a weight, its transpose, and two more
  struct View {
    uint64_t spec = 0;
    at::Tensor tensor;
  };
  c10::Storage storage_;
  std::array<View, kViews> views_;
  uint32_t next_ = 0;
};

}  // namespace understudy::server
