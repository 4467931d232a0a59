#include "recovery/snapshots/csrc/storage/stream_copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace understudy::persistence {

#ifdef __x86_64__
namespace {

constexpr uint64_t kLine = 64;

// Precondition for both: `to` begins a cache line.
void stream_sse2(uint8_t* to, const uint8_t* from, uint64_t lines) {
  for (uint64_t i = 0; i < lines; i++, to += kLine, from += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

__attribute__((target("avx512f"))) void stream_avx512(uint8_t* to, const uint8_t* from, uint64_t lines) {
  for (uint64_t i = 0; i < lines; i++, to += kLine, from += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

// Precondition: within one cache line.
void store_and_flush(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes == 0) return;
  std::memcpy(to, from, bytes);
  _mm_clflush(to);  // every x86-64 has it, and it stays behind the stores to its line
}

}  // namespace

bool can_stream(Stream stream) {
  return stream == Stream::kSse2 || __builtin_cpu_supports("avx512f");  // SSE2 is part of x86-64
}

Stream best_stream() { return can_stream(Stream::kAvx512) ? Stream::kAvx512 : Stream::kSse2; }

void stream_copy(Stream stream, uint8_t* to, const uint8_t* from, uint64_t bytes) {
  const uint64_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  store_and_flush(to, from, head);
  to += head, from += head, bytes -= head;
  const uint64_t lines = bytes / kLine;
  (stream == Stream::kAvx512 ? stream_avx512 : stream_sse2)(to, from, lines);
  store_and_flush(to + lines * kLine, from + lines * kLine, bytes % kLine);
}

void fence_stores() { _mm_sfence(); }

#else

bool can_stream(Stream) { return false; }
Stream best_stream() { return Stream::kSse2; }
void stream_copy(Stream, uint8_t*, const uint8_t*, uint64_t) { std::abort(); }
void fence_stores() { std::abort(); }

#endif

}  // namespace understudy::persistence
