// The leaves of the digests of buffers' contents (replay/csrc/digest/digest.h), of all buffers in one launch.
#include "replay/csrc/digest/piece_digest.h"

namespace piece = understudy::replay::piece;

namespace {

// The row that has a piece: the last one that begins at or before it.
__device__ unsigned row_of(const piece::Row* rows, unsigned count, uint64_t number) {
  unsigned low = 0, high = count;
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (rows[middle].first <= number ? low : high) = middle;
  }
  return low;
}

// Eight bytes, of which those from `end` on are zeroes.
__device__ uint64_t word_before(const uint8_t* at, const uint8_t* end) {
  uint64_t word = 0;
  for (unsigned i = 0; i < 8; i++)
    if (at + i < end) word |= static_cast<uint64_t>(at[i]) << 8 * i;
  return word;
}

}  // namespace

// leaves[i] becomes the XXH3-64 of piece i. Contents begin at multiples of 16 bytes. Blocks of a multiple of
// 32 threads; any number of blocks.
extern "C" __global__ void __launch_bounds__(256)
    piece_digests(const piece::Row* rows, unsigned count, uint64_t pieces, piece::Keys keys,
                  uint64_t* leaves) {
  __shared__ piece::Keys shared;
  for (unsigned i = threadIdx.x; i < sizeof shared / 8; i += blockDim.x)
    reinterpret_cast<uint64_t*>(&shared)[i] = reinterpret_cast<const uint64_t*>(&keys)[i];
  __syncthreads();
  const unsigned thread = threadIdx.x % piece::kThreads;
  const uint64_t together = static_cast<uint64_t>(gridDim.x) * blockDim.x / piece::kThreads;
  const uint64_t mine = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / piece::kThreads;
  // All threads of a warp go round equally often, as they exchange their parts.
  for (uint64_t base = 0; base < pieces; base += together) {
    const uint64_t number = base + mine;
    uint64_t sum = 0;
    if (number < pieces) {
      const piece::Row& row = rows[row_of(rows, count, number)];
      const uint64_t offset = (number - row.first) * piece::kBytes;
      const uint8_t* const from = row.content + offset + 16 * thread;
      const uint8_t* const end = row.content + row.bytes;
      if (row.bytes - offset >= piece::kBytes)
        sum = piece::part(thread, shared, [&](unsigned stripe, uint64_t& first, uint64_t& second) {
          const auto both = __ldg(reinterpret_cast<const ulonglong2*>(from + piece::kStripe * stripe));
          first = both.x, second = both.y;
        });
      else
        sum = piece::part(thread, shared, [&](unsigned stripe, uint64_t& first, uint64_t& second) {
          first = word_before(from + piece::kStripe * stripe, end);
          second = word_before(from + piece::kStripe * stripe + 8, end);
        });
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (thread == 0 && number < pieces) leaves[number] = piece::finish(sum);
  }
}

// Contents that are digested whole, as they are, each by one block: behind `gathered`, from its `first` on.
extern "C" __global__ void gather(const piece::Row* rows, uint8_t* gathered) {
  const piece::Row row = rows[blockIdx.x];
  for (uint64_t i = threadIdx.x; i < row.bytes; i += blockDim.x) gathered[row.first + i] = row.content[i];
}
