// The shape cache: a call's key finds its template in the log's dictionary and the layout of its results.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <optional>
#include <vector>

#include "proxy_client/csrc/call/call_encoding.h"

namespace understudy::client {

// One tensor that a call returns.
struct Output {
  enum class Origin {
    kFresh,  // a new storage, a new handle
    kUndefined,
    kView,      // shares the storage of a device argument
    kArgument,  // is a device argument
  };
  Origin origin = Origin::kFresh;
  size_t argument = 0;  // index among the call's device tensors, for kView and kArgument
  c10::ScalarType dtype{};
  int64_t offset = 0;
  size_t bytes = 0;  // of the storage
  c10::SmallVector<int64_t, 5> sizes, strides;
  uint64_t flags = 0;  // as lazy_flags()
};

// One value that a call returns.
struct Result {
  enum class Kind : uint64_t { kWrittenArgument = 0, kTensor = 1, kTensorList = 2, kNumber = 3 };
  Kind kind = Kind::kWrittenArgument;
  std::vector<Output> outputs;
  uint64_t flags = 0;  // of a written argument: kOtherFlags and the bits, if they are not those it came with
  int64_t number = 0;
};

// A device argument that the call gives another shape (out= variants).
struct Resize {
  size_t argument;
  std::vector<int64_t> sizes, strides;
  uint64_t flags = 0;  // as lazy_flags()
};

struct CallTemplate : c10::intrusive_ptr_target {
  std::vector<uint64_t> key;
  bool has_key(const WordBuffer& words) const {
    return key.size() == words.size() && std::memcmp(key.data(), words.data(), 8 * key.size()) == 0;
  }
  mutable std::atomic<uint64_t> id{0};  // another one whenever it had to be stored again
  bool synchronous = false;             // results are only known by the server
  std::vector<Result> results;
  std::vector<Resize> resizes;
  size_t fresh = 0, fresh_bytes = 0;    // outputs with Origin::kFresh; of their storages, together
  bool needs_arguments = false;         // results refer to device arguments
  bool lazy = false;                    // results are conjugated or negated by a bit
  bool direct = false;                  // nothing but fresh results and written arguments
  std::optional<c10::IValue> constant;  // the remembered result of an operator that depends on metadata only
};

// How `tensor` came about, given the device arguments of its call.
Output describe_output(const at::Tensor& tensor, c10::ArrayRef<at::Tensor> device_arguments,
                       size_t storage_bytes);

// What a call returned, which is no written argument; `describe` answers an Output.
template <class Describe>
Result describe_result(const c10::IValue& value, const Describe& describe) {
  if (value.isInt()) return {.kind = Result::Kind::kNumber, .outputs = {}, .number = value.toInt()};
  Result result{.kind = Result::Kind::kTensor, .outputs = {}};
  if (value.isTensorList()) {
    result.kind = Result::Kind::kTensorList;
    for (const at::Tensor& tensor : value.toTensorVector()) result.outputs.push_back(describe(tensor));
  } else {
    result.outputs.push_back(describe(value.isTensor() ? value.toTensor() : at::Tensor()));
  }
  return result;
}

// Recounts `fresh` and `needs_arguments` from the results.
void summarise(CallTemplate& entry);

// Writes the template into the dictionary and remembers its id.
void publish(LogWriter& log, const CallTemplate& entry);

// `send(id)` appends a record that names the template; again if that had been retired meanwhile.
template <class Send>
[[gnu::always_inline]] inline void send_with_template(LogWriter& log, const CallTemplate& entry,
                                                      Send&& send) {
  for (;;) {
    try {
      return send(entry.id.load(std::memory_order_acquire));
    } catch (const replay::RetiredTemplate&) {
      publish(log, entry);
    }
  }
}

// The templates that one thread has met: one look, no lock. Those that were not used for so long that they
// are gone from the dictionary are forgotten, here and for all threads.
class TemplateTable {
 public:
  // A minibatch is like the one before: tried first, without a hash, is what came behind the last one then.
  const CallTemplate* find(const WordBuffer& key) {
    const size_t guess = slots_[last_ & mask_].next & mask_;
    const Slot& slot = slots_[guess];
    if (C10_UNLIKELY(!slot.entry || !slot.entry->has_key(key))) return find_by_hash(key);
    last_ = guess;
    return slot.entry.get();
  }
  // The entry is found by every thread. It lives until the calling thread looks for another template, in a
  // call that is not part of this one.
  const CallTemplate* keep(c10::intrusive_ptr<CallTemplate> entry);

 private:
  struct Slot {
    uint64_t hash = 0;
    size_t next = 0;  // where what was looked for behind this one was found; of no meaning once slots move
    c10::intrusive_ptr<const CallTemplate> entry;
  };
  static constexpr size_t kFirstSlots = 1024;
  const CallTemplate* find_by_hash(const WordBuffer& key);
  const CallTemplate* find_shared(const WordBuffer& key, uint64_t hash);
  const CallTemplate* add(Slot slot);
  void place(Slot slot);
  void forget_before(uint64_t begin);

  size_t used_ = 0, mask_ = kFirstSlots - 1, last_ = 0;
  uint64_t forgotten_ = 0;  // ids below this were forgotten
  std::vector<Slot> slots_{kFirstSlots};
};

// Templates that exist in this process.
size_t template_count();

}  // namespace understudy::client
