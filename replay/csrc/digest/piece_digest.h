// XXH3-64 of one piece of kDigestPiece bytes (replay/csrc/digest/digest.h), by four threads of a GPU: each
// has two of its eight accumulators. The same header for nvcc and for the host, where a test holds it against
// xxhash.
//
// Source: the specification of XXH3 for inputs above 240 bytes, without a seed (third_party/xxhash).
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define UNDERSTUDY_ANYWHERE __host__ __device__ __forceinline__
#define UNDERSTUDY_UNROLL _Pragma("unroll")
#else
#define UNDERSTUDY_ANYWHERE inline
#define UNDERSTUDY_UNROLL _Pragma("GCC unroll 16")
#endif

namespace understudy::replay::piece {

constexpr unsigned kBytes = 4096;
constexpr unsigned kThreads = 4;
constexpr unsigned kStripe = 64;  // bytes that the threads take together
constexpr unsigned kBlock = 16;   // stripes between two scrambles
constexpr unsigned kBlocks = kBytes / kStripe / kBlock;
constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ull, kPrime64_2 = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9ull, kPrime64_4 = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5ull, kAvalanche = 0x165667919E3779F9ull;

// Words of XXH3's secret: from its bytes 8 i, 121 + 8 i and 11 + 8 i on.
struct Keys {
  uint64_t stripe[24], last_stripe[8], merge[8];
};

struct Accumulators {
  uint64_t first, second;
};

UNDERSTUDY_ANYWHERE uint64_t halves_multiplied(uint64_t word) {
  return static_cast<uint64_t>(static_cast<uint32_t>(word)) * static_cast<uint32_t>(word >> 32);
}

UNDERSTUDY_ANYWHERE Accumulators begin(unsigned thread) {
  switch (thread) {
    case 0:
      return {kPrime32_3, kPrime64_1};
    case 1:
      return {kPrime64_2, kPrime64_3};
    case 2:
      return {kPrime64_4, kPrime32_2};
    default:
      return {kPrime64_5, kPrime32_1};
  }
}

UNDERSTUDY_ANYWHERE void add(Accumulators& sums, uint64_t first, uint64_t second, const uint64_t* keys) {
  sums.first += second + halves_multiplied(first ^ keys[0]);
  sums.second += first + halves_multiplied(second ^ keys[1]);
}

UNDERSTUDY_ANYWHERE uint64_t scrambled(uint64_t sum, uint64_t key) {
  return (sum ^ (sum >> 47) ^ key) * kPrime32_1;
}

UNDERSTUDY_ANYWHERE uint64_t folded(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return a * b ^ __umul64hi(a, b);
#else
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

// What one thread makes of its words; `load(stripe, first, second)` gives those of a stripe, which lie at
// byte 16 thread of it.
template <class Load>
UNDERSTUDY_ANYWHERE uint64_t part(unsigned thread, const Keys& keys, Load load) {
  Accumulators sums = begin(thread);
  for (unsigned block = 0; block < kBlocks; block++) {
    UNDERSTUDY_UNROLL
    for (unsigned stripe = 0; stripe < kBlock; stripe++) {
      uint64_t first, second;
      load(kBlock * block + stripe, first, second);
      const bool last = block == kBlocks - 1 && stripe == kBlock - 1;
      add(sums, first, second, last ? keys.last_stripe + 2 * thread : keys.stripe + stripe + 2 * thread);
    }
    if (block == kBlocks - 1) break;
    sums.first = scrambled(sums.first, keys.stripe[kBlock + 2 * thread]);
    sums.second = scrambled(sums.second, keys.stripe[kBlock + 2 * thread + 1]);
  }
  return folded(sums.first ^ keys.merge[2 * thread], sums.second ^ keys.merge[2 * thread + 1]);
}

// Of the sum of all threads' parts.
UNDERSTUDY_ANYWHERE uint64_t finish(uint64_t sum) {
  uint64_t hash = kBytes * kPrime64_1 + sum;
  hash = (hash ^ (hash >> 37)) * kAvalanche;
  return hash ^ (hash >> 32);
}

// A buffer that is wanted; `first` is the number of its first piece among those of all buffers, or that of
// its first byte.
struct Row {
  const uint8_t* content;
  uint64_t bytes, first;
};

}  // namespace understudy::replay::piece
