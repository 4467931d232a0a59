#include "proxy_client/csrc/shapes/shape_cache.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "proxy_client/csrc/call/call_encoder.h"
#include "proxy_client/csrc/call/thread_state.h"
#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/operators/custom_operators.h"

namespace understudy::client {
namespace {

struct Cache {
  std::shared_mutex mutex;
  std::unordered_multimap<uint64_t, c10::intrusive_ptr<const CallTemplate>> entries;
  std::atomic<uint64_t> begin{0};  // templates of smaller ids are gone from the dictionary
};

Cache& cache() {
  static Cache& instance =
      *std::make_unique<Cache>().release();  // threads may still call while the process ends
  return instance;
}

constexpr size_t kLanes = 4;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;

uint64_t stir(uint64_t lane, uint64_t word) { return std::rotl((lane ^ word) * kOdd, 29); }

// Who holds a template in a table of its own may be about to use it: those are left for the next time.
void forget_before(uint64_t begin) {
  Cache& all = cache();
  if (all.begin.load(std::memory_order_relaxed) >= begin) return;
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  all.begin.store(begin, std::memory_order_relaxed);
  std::erase_if(all.entries, [&](const auto& item) {
    return item.second.use_count() == 1 && item.second->id.load(std::memory_order_relaxed) < begin;
  });
}

// Four lanes that do not wait for each other. Equality is always decided by the words themselves.
uint64_t hash_words(const uint64_t* at, size_t left) noexcept {
  uint64_t lanes[kLanes] = {left, 0xD1B54A32D192ED03ull, 0xA0761D6478BD642Full, 0x8EBC6AF09C88C6E3ull};
  for (; left >= kLanes; left -= kLanes, at += kLanes)
    for (size_t i = 0; i < kLanes; i++) lanes[i] = stir(lanes[i], at[i]);
  for (size_t i = 0; i < left; i++) lanes[i] = stir(lanes[i], at[i]);
  uint64_t mixed = stir(stir(lanes[0], lanes[1]), stir(lanes[2], lanes[3]));
  mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9ull;
  return mixed ^ (mixed >> 32);
}

}  // namespace

const CallTemplate* TemplateTable::find_by_hash(const WordBuffer& key) {
  const uint64_t hash = hash_words(key.data(), key.size());
  for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
    const Slot& slot = slots_[i];
    if (!slot.entry) return find_shared(key, hash);
    if (slot.hash != hash || !slot.entry->has_key(key)) continue;
    slots_[last_ & mask_].next = i;
    last_ = i;
    return slot.entry.get();
  }
}

const CallTemplate* TemplateTable::find_shared(const WordBuffer& key, uint64_t hash) {
  // A call within a call has an encoding of its own; the outer one may be using what would be forgotten.
  const uint64_t gone = cache().begin.load(std::memory_order_relaxed);
  if (gone != forgotten_ && &key == &thread_state().encoding.key) forget_before(gone);
  std::shared_lock<std::shared_mutex> lock(cache().mutex);
  const auto [begin, end] = cache().entries.equal_range(hash);
  for (auto candidate = begin; candidate != end; ++candidate)
    if (candidate->second->has_key(key)) return add({.hash = hash, .entry = candidate->second});
  return nullptr;
}

const CallTemplate* TemplateTable::keep(c10::intrusive_ptr<CallTemplate> entry) {
  const uint64_t hash = hash_words(entry->key.data(), entry->key.size());
  entry->direct = !entry->synchronous && !entry->constant && !entry->needs_arguments && !entry->lazy &&
                  entry->resizes.empty() &&
                  std::none_of(entry->results.begin(), entry->results.end(),
                               [](const Result& result) { return result.kind == Result::Kind::kNumber; });
  const c10::intrusive_ptr<const CallTemplate> kept = std::move(entry);
  {
    std::unique_lock<std::shared_mutex> lock(cache().mutex);
    cache().entries.emplace(hash, kept);
  }
  return add({.hash = hash, .entry = kept});
}

const CallTemplate* TemplateTable::add(Slot slot) {
  const CallTemplate* const entry = slot.entry.get();
  if (2 * ++used_ > slots_.size()) {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (Slot& known : old)
      if (known.entry) place(std::move(known));
  }
  place(std::move(slot));
  return entry;
}

void TemplateTable::place(Slot slot) {
  size_t i = slot.hash & mask_;
  while (slots_[i].entry) i = (i + 1) & mask_;
  slots_[i] = std::move(slot);
}

void TemplateTable::forget_before(uint64_t begin) {
  std::vector<Slot> old(kFirstSlots);
  old.swap(slots_);
  mask_ = kFirstSlots - 1;
  used_ = 0;
  forgotten_ = begin;
  for (Slot& slot : old)
    if (slot.entry && slot.entry->id.load(std::memory_order_relaxed) >= begin) add(std::move(slot));
}

size_t template_count() {
  std::shared_lock<std::shared_mutex> lock(cache().mutex);
  return cache().entries.size();
}

Output describe_output(const at::Tensor& tensor, c10::ArrayRef<at::Tensor> device_arguments,
                       size_t storage_bytes) {
  Output output;
  if (!tensor.defined()) {
    output.origin = Output::Origin::kUndefined;
    return output;
  }
  output.dtype = tensor.scalar_type();
  output.offset = tensor.storage_offset();
  output.bytes = storage_bytes;
  output.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  output.strides.assign(tensor.strides().begin(), tensor.strides().end());
  output.flags = lazy_flags(tensor);
  for (size_t i = 0; i < device_arguments.size(); i++) {
    if (!device_arguments[i].defined()) continue;
    if (device_arguments[i].is_same(tensor)) {
      output.origin = Output::Origin::kArgument;
      output.argument = i;
      return output;
    }
    if (output.origin == Output::Origin::kFresh && device_arguments[i].is_alias_of(tensor)) {
      output.origin = Output::Origin::kView;
      output.argument = i;
    }
  }
  return output;
}

void summarise(CallTemplate& entry) {
  entry.fresh = entry.fresh_bytes = 0;
  entry.needs_arguments = !entry.resizes.empty();
  for (const Result& result : entry.results)
    for (const Output& output : result.outputs) {
      if (output.origin == Output::Origin::kFresh) entry.fresh++, entry.fresh_bytes += output.bytes;
      if (output.flags != 0) entry.lazy = true;
      if (output.origin == Output::Origin::kView || output.origin == Output::Origin::kArgument)
        entry.needs_arguments = true;
    }
}

void publish(LogWriter& log, const CallTemplate& entry) {
  const OperatorInfo& info = operator_of(entry.key[0]);
  std::vector<uint64_t> words;
  if (!entry.synchronous)
    for (const Result& result : entry.results) {
      const bool written = result.kind == Result::Kind::kWrittenArgument;
      words.push_back(static_cast<uint64_t>(result.kind) | (written ? result.flags : result.outputs.size())
                                                               << 8);
      if (result.kind == Result::Kind::kNumber) words.push_back(static_cast<uint64_t>(result.number));
      for (const Output& output : result.outputs) {
        const bool fresh = output.origin == Output::Origin::kFresh;
        words.push_back((fresh ? 0 : 1) | static_cast<uint64_t>(output.dtype) << 8 |
                        output.sizes.size() << 16 | output.flags << 24);
        if (!fresh) continue;
        words.push_back(static_cast<uint64_t>(output.offset));
        words.push_back(output.bytes);
        for (const int64_t size : output.sizes) words.push_back(static_cast<uint64_t>(size));
        for (const int64_t stride : output.strides) words.push_back(static_cast<uint64_t>(stride));
      }
    }
  const std::string& name = info.custom ? with_libraries(info.name) : info.name;
  try {
    entry.id.store(
        log.put_template(name, entry.key.data() + 1, entry.key.size() - 1, words.data(), words.size()),
        std::memory_order_release);
  } catch (const replay::RemoteError& error) {  // where it had to wait for room
    raise_as_torch_error(error);
  }
  forget_before(log.page().worker().dictionary_begin.load(std::memory_order_relaxed));
}

}  // namespace understudy::client
