// A GPU's digests of pieces, as its threads make them, on the host: they must be those of xxhash.
//
//   piece_digest PIECES SEED
//
// Ends with 1 and a sentence if any differs.
#include "replay/csrc/digest/piece_digest.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "replay/csrc/digest/digest.h"
#include "replay/csrc/digest/piece_keys.h"

namespace understudy::replay {
namespace {

static_assert(piece::kBytes == kDigestPiece);

uint64_t as_four_threads(const uint8_t* content, const piece::Keys& keys) {
  uint64_t sum = 0;
  for (unsigned thread = 0; thread < piece::kThreads; thread++)
    sum += piece::part(thread, keys, [&](unsigned stripe, uint64_t& first, uint64_t& second) {
      const uint8_t* const from = content + piece::kStripe * stripe + 16 * thread;
      std::memcpy(&first, from, 8);
      std::memcpy(&second, from + 8, 8);
    });
  return piece::finish(sum);
}

}  // namespace
}  // namespace understudy::replay

int main(int, char** arguments) {
  using namespace understudy::replay;
  std::mt19937_64 chance(std::strtoull(arguments[2], nullptr, 10));
  std::vector<uint64_t> content(kDigestPiece / 8);
  const piece::Keys keys = piece::keys();
  unsigned long long wrong = 0, pieces = std::strtoull(arguments[1], nullptr, 10);
  for (unsigned long long i = 0; i < pieces; i++) {
    // Most are random; others are nearly empty, as the last pieces of contents.
    for (uint64_t& word : content) word = i % 8 == 0 && chance() % 64 != 0 ? 0 : chance();
    const auto* bytes = reinterpret_cast<const uint8_t*>(content.data());
    wrong += as_four_threads(bytes, keys) != understudy::xxh3::of(bytes, kDigestPiece);
  }
  std::printf("%llu pieces, %llu differ from xxhash\n", pieces, wrong);
  return wrong != 0;
}
