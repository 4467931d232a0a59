#include "proxy_client/csrc/shape_cache.h"

#include <ATen/ATen.h>

#include <bit>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "proxy_client/csrc/client_tensor.h"
#include "proxy_client/csrc/custom_operators.h"

namespace understudy::client {
namespace {

struct Cache {
  std::shared_mutex mutex;
  std::unordered_multimap<uint64_t, std::unique_ptr<CallTemplate>> entries;
};

Cache& cache() {
  static Cache& instance =
      *std::make_unique<Cache>().release();  // threads may still call while the process ends
  return instance;
}

constexpr size_t kLanes = 4;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;

uint64_t stir(uint64_t lane, uint64_t word) { return std::rotl((lane ^ word) * kOdd, 29); }

}  // namespace

// Four lanes that do not wait for each other. Equality is always decided by the words themselves.
uint64_t hash_words(const WordBuffer& words) noexcept {
  const uint64_t* at = words.data();
  size_t left = words.size();
  uint64_t lanes[kLanes] = {left, 0xD1B54A32D192ED03ull, 0xA0761D6478BD642Full, 0x8EBC6AF09C88C6E3ull};
  for (; left >= kLanes; left -= kLanes, at += kLanes)
    for (size_t i = 0; i < kLanes; i++) lanes[i] = stir(lanes[i], at[i]);
  for (size_t i = 0; i < left; i++) lanes[i] = stir(lanes[i], at[i]);
  uint64_t mixed = stir(stir(lanes[0], lanes[1]), stir(lanes[2], lanes[3]));
  mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9ull;
  return mixed ^ (mixed >> 32);
}

const CallTemplate* TemplateTable::find_shared(const WordBuffer& key, uint64_t hash) {
  std::shared_lock<std::shared_mutex> lock(cache().mutex);
  const auto [begin, end] = cache().entries.equal_range(hash);
  for (auto candidate = begin; candidate != end; ++candidate)
    if (candidate->second->has_key(key)) {
      add(candidate->second.get(), hash);
      return candidate->second.get();
    }
  return nullptr;
}

const CallTemplate* TemplateTable::keep(std::unique_ptr<CallTemplate> entry, uint64_t hash) {
  entry->direct = !entry->synchronous && !entry->constant && !entry->needs_arguments && !entry->lazy &&
                  entry->resizes.empty();
  const CallTemplate* kept = entry.get();
  {
    std::unique_lock<std::shared_mutex> lock(cache().mutex);
    cache().entries.emplace(hash, std::move(entry));
  }
  add(kept, hash);
  return kept;
}

void TemplateTable::add(const CallTemplate* entry, uint64_t hash) {
  if (2 * ++used_ > slots_.size()) {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old)
      if (slot.entry) place(slot);
  }
  place({hash, entry});
}

void TemplateTable::place(const Slot& slot) {
  size_t i = slot.hash & mask_;
  while (slots_[i].entry) i = (i + 1) & mask_;
  slots_[i] = slot;
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
  entry.fresh = 0;
  entry.needs_arguments = !entry.resizes.empty();
  for (const Result& result : entry.results)
    for (const Output& output : result.outputs) {
      if (output.origin == Output::Origin::kFresh) entry.fresh++;
      if (output.flags != 0) entry.lazy = true;
      if (output.origin == Output::Origin::kView || output.origin == Output::Origin::kArgument)
        entry.needs_arguments = true;
    }
}

void publish(LogWriter& log, const OperatorInfo& info, const Encoding& encoding, CallTemplate& entry) {
  std::vector<uint64_t> words;
  if (!entry.synchronous)
    for (const Result& result : entry.results) {
      const bool written = result.kind == Result::Kind::kWrittenArgument;
      words.push_back(static_cast<uint64_t>(result.kind) | (written ? result.flags : result.outputs.size())
                                                               << 8);
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
  entry.dictionary_offset =
      log.put_template(name, encoding.stored_key(), encoding.stored_key_words(), words.data(), words.size());
}

}  // namespace understudy::client
