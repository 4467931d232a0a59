// Words that are appended one by one and forgotten together; the memory stays for the next call.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace understudy::client {

class WordBuffer {
 public:
  const uint64_t* data() const { return begin_.get(); }
  uint64_t* data() { return begin_.get(); }
  size_t size() const { return size_; }
  void clear() { size_ = 0; }

  // Room for `words` more, to be written by the caller.
  uint64_t* extend(size_t words) {
    if (__builtin_expect(size_ + words > capacity_, 0)) grow(words);
    uint64_t* const at = begin_.get() + size_;
    size_ += words;
    return at;
  }
  void push(uint64_t word) { *extend(1) = word; }
  // `bytes` bytes, padded with zeros to whole words.
  void push_bytes(const void* data, size_t bytes) {
    const size_t words = (bytes + 7) / 8;
    uint64_t* const at = extend(words);
    if (words == 0) return;
    at[words - 1] = 0;
    std::memcpy(at, data, bytes);
  }

 private:
  static constexpr size_t kFirstWords = 256;
  [[gnu::noinline]] void grow(size_t words) {
    const size_t wanted = std::max({kFirstWords, 2 * capacity_, size_ + words});
    auto bigger = std::make_unique_for_overwrite<uint64_t[]>(wanted);
    if (size_ != 0) std::memcpy(bigger.get(), begin_.get(), 8 * size_);
    begin_ = std::move(bigger);
    capacity_ = wanted;
  }

  std::unique_ptr<uint64_t[]> begin_;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace understudy::client
