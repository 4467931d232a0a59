#include "proxy_client/csrc/shape_cache.h"

#include <ATen/ATen.h>

#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

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

// The last entry seen for a hash, without a lock.
thread_local std::unordered_map<uint64_t, const CallTemplate*> recent;

bool matches(const CallTemplate& entry, const std::vector<uint64_t>& key) { return entry.key == key; }

}  // namespace

uint64_t hash_words(const std::vector<uint64_t>& words) noexcept {
  using Wide = unsigned __int128;
  uint64_t a = 0x9E3779B97F4A7C15ull ^ words.size(), b = 0xD1B54A32D192ED03ull;
  size_t i = 0;
  for (; i + 1 < words.size(); i += 2) {
    const Wide product = static_cast<Wide>(words[i] ^ a) * (words[i + 1] ^ b);
    a = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ 0xA0761D6478BD642Full;
    b += a;
  }
  if (i < words.size()) {
    const Wide product = static_cast<Wide>(words[i] ^ a) * b;
    a = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  a = (a ^ (a >> 29)) * 0xBF58476D1CE4E5B9ull;
  return a ^ (a >> 32);
}

const CallTemplate* find_template(const std::vector<uint64_t>& key, uint64_t hash) {
  if (const auto known = recent.find(hash); known != recent.end() && matches(*known->second, key))
    return known->second;
  std::shared_lock<std::shared_mutex> lock(cache().mutex);
  const auto [begin, end] = cache().entries.equal_range(hash);
  for (auto candidate = begin; candidate != end; ++candidate)
    if (matches(*candidate->second, key)) return recent[hash] = candidate->second.get();
  return nullptr;
}

const CallTemplate* keep_template(std::unique_ptr<CallTemplate> entry, uint64_t hash) {
  const CallTemplate* kept = recent[hash] = entry.get();
  std::unique_lock<std::shared_mutex> lock(cache().mutex);
  cache().entries.emplace(hash, std::move(entry));
  return kept;
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
      if (output.origin == Output::Origin::kView || output.origin == Output::Origin::kArgument)
        entry.needs_arguments = true;
    }
}

void publish(LogWriter& log, const OperatorInfo& info, const Encoding& encoding, CallTemplate& entry) {
  std::vector<uint64_t> words;
  if (!entry.synchronous)
    for (const Result& result : entry.results) {
      words.push_back(static_cast<uint64_t>(result.kind) | result.outputs.size() << 8);
      for (const Output& output : result.outputs) {
        const bool fresh = output.origin == Output::Origin::kFresh;
        words.push_back((fresh ? 0 : 1) | static_cast<uint64_t>(output.dtype) << 8 |
                        output.sizes.size() << 16);
        if (!fresh) continue;
        words.push_back(static_cast<uint64_t>(output.offset));
        words.push_back(output.bytes);
        for (const int64_t size : output.sizes) words.push_back(static_cast<uint64_t>(size));
        for (const int64_t stride : output.strides) words.push_back(static_cast<uint64_t>(stride));
      }
    }
  entry.dictionary_offset = log.put_template(info.name, encoding.stored_key(), encoding.stored_key_words(),
                                             words.data(), words.size());
}

}  // namespace understudy::client
