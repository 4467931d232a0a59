// XXH3-64 (third_party/xxhash), with AVX2 where the processor has it: more than twice as fast, the same bits.
// The vendored header picks its vectors when it is compiled, and we compile for any x86-64; so its loops for
// long contents are made twice here, and `cpuid` picks once. (AVX-512 was no faster where it was tried.)
//
// No other file includes xxhash.h: its functions would be compiled once more without these loops.
#pragma once
#define XXH_INLINE_ALL
#ifdef __x86_64__
#include <immintrin.h>
#define XXH_DISPATCH_AVX2 1
#define XXH_TARGET_AVX2 __attribute__((__target__("avx2")))
#define XXH_ACC_ALIGN 32  // as AVX2 loads them
#endif
#include <cstddef>
#include <cstdint>

#include "third_party/xxhash/xxhash.h"

namespace understudy::xxh3 {

enum class Width : uint8_t { kPlain, kAvx2 };  // plain: SSE2, which is part of x86-64, or no vectors

inline Width widest() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) return Width::kAvx2;
#endif
  return Width::kPlain;
}

// Plain before it is initialized, which changes no bit.
inline const Width chosen = widest();

#ifdef __x86_64__
// Precondition: more than XXH3_MIDSIZE_MAX bytes.
__attribute__((noinline)) XXH_TARGET_AVX2 inline uint64_t long_avx2(const void* data, size_t bytes) {
  return XXH3_hashLong_64b_internal(data, bytes, XXH3_kSecret, sizeof(XXH3_kSecret), XXH3_accumulate_avx2,
                                    XXH3_scrambleAcc_avx2);
}

__attribute__((noinline)) XXH_TARGET_AVX2 inline void update_avx2(XXH3_state_t* state, const void* data,
                                                                  size_t bytes) {
  XXH3_update(state, static_cast<const uint8_t*>(data), bytes, XXH3_accumulate_avx2, XXH3_scrambleAcc_avx2);
}
#endif

inline uint64_t of(const void* data, size_t bytes, [[maybe_unused]] Width width = chosen) {
#ifdef __x86_64__
  if (bytes > XXH3_MIDSIZE_MAX && width == Width::kAvx2) return long_avx2(data, bytes);
#endif
  return XXH3_64bits(data, bytes);
}

// The same of what comes in pieces.
class Stream {
 public:
  explicit Stream(Width width = chosen) : width_(width) { XXH3_64bits_reset(&state_); }
  void add(const void* data, size_t bytes) {
#ifdef __x86_64__
    if (width_ == Width::kAvx2) return update_avx2(&state_, data, bytes);
#endif
    XXH3_64bits_update(&state_, data, bytes);
  }
  uint64_t value() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
  [[maybe_unused]] Width width_;
};

}  // namespace understudy::xxh3
