// The answer to a synchronous operator: values, and how its tensors lie in their buffers.
#pragma once
#include <ATen/core/ivalue.h>

#include <vector>

#include "proxy_server/csrc/calls/composite.h"

namespace understudy::server {

class CallResults {
 public:
  // `known`: what the call was given. New buffers are created under handles from `first_handle` on.
  CallResults(DeviceState& state, const ArgumentStorages& known, uint64_t first_handle)
      : state_(state), known_(known), next_(first_handle), words_{0} {}

  // One more value of the answer; a type that has no form in it becomes None.
  void add(const c10::IValue& value);
  const std::vector<uint64_t>& words() const { return words_; }
  uint64_t end_handle() const { return next_; }  // behind the last new buffer

 private:
  void put(const at::Tensor& tensor);
  void put_composite(const at::Tensor& tensor);
  void put_nested(const at::Tensor& tensor);
  void put_dense(const at::Tensor& tensor);

  DeviceState& state_;
  const ArgumentStorages& known_;
  uint64_t next_;
  std::vector<const void*> given_;  // storages that have a handle by now
  std::vector<uint64_t> words_;
};

}  // namespace understudy::server
