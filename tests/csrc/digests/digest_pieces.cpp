// Digests of contents that come in pieces, by the real StreamedDigest and ContentDigest: a piece's memory is
// used again as soon as the next but one comes, as that of proxy_server/csrc/driver/digest_staging.cpp.
//
//   digest_pieces ROUNDS SEED
//
// Ends with 1 and a sentence for each size whose digest depends on how it was cut, or on how wide the
// processor's vectors are: each content is digested as on one without AVX2, too.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "replay/csrc/digest/digest.h"

namespace understudy::replay {
namespace {

// Where XXH3 goes another way: short inputs by length, stripes of 64 bytes, its buffer of 256, blocks of
// 1024.
constexpr size_t kBorders[] = {0, 3, 8, 16, 64, 128, 240, 256, 512, 1024, 2048, 4096, 65536};
constexpr size_t kLargest = 1 << 18;
constexpr uint64_t kOfNothing =
    0x2d06800538d394c2;  // XXH3-64 of no bytes: digests are stored, and may not change

class Pieces {
 public:
  explicit Pieces(uint64_t seed) : chance_(seed), content_(kLargest) {
    for (uint8_t& byte : content_) byte = static_cast<uint8_t>(chance_());
  }

  void compare(size_t bytes, size_t longest_piece) {
    compare<StreamedDigest>(digest, bytes, longest_piece);
    compare<ContentDigest>(content_digest, bytes, longest_piece);
  }

  size_t below(size_t end) { return chance_() % end; }

  uint64_t compared = 0, wrong = 0;

 private:
  using Whole = uint64_t (*)(const void*, size_t, xxh3::Width);

  template <class Streamed>
  void compare(Whole whole, size_t bytes, size_t longest_piece) {
    Streamed streamed(below(2) == 0 ? xxh3::Width::kPlain : xxh3::chosen);
    for (size_t done = 0; done < bytes;) {
      const size_t piece = std::min<size_t>(below(longest_piece + 1), bytes - done);  // some are empty
      add(streamed, done, piece);
      done += piece;
      if (below(64) == 0) (void)streamed.value();  // looking at it changes nothing
    }
    compared++;
    if (whole(content_.data(), bytes, xxh3::Width::kPlain) != whole(content_.data(), bytes, xxh3::chosen)) {
      wrong++;
      std::printf("%zu bytes have another digest with AVX2\n", bytes);
    }
    if (streamed.value() == whole(content_.data(), bytes, xxh3::chosen)) return;
    wrong++;
    std::printf("%zu bytes in pieces of up to %zu have another digest than the whole\n", bytes,
                longest_piece);
  }

  // From memory of just that size, which is another's when the next but one comes.
  template <class Streamed>
  void add(Streamed& streamed, size_t from, size_t bytes) {
    std::unique_ptr<uint8_t[]>& half = halves_[next_++ % 2];
    half = std::make_unique<uint8_t[]>(bytes);
    std::copy_n(content_.data() + from, bytes, half.get());
    streamed.add(half.get(), bytes);
    if (below(2) == 0) std::fill_n(half.get(), bytes, static_cast<uint8_t>(0xa5));
  }

  std::mt19937_64 chance_;
  std::vector<uint8_t> content_;
  std::array<std::unique_ptr<uint8_t[]>, 2> halves_;
  size_t next_ = 0;
};

}  // namespace
}  // namespace understudy::replay

int main(int, char** arguments) {
  using namespace understudy::replay;
  Pieces pieces(std::strtoull(arguments[2], nullptr, 10));
  if (StreamedDigest().value() != kOfNothing || digest(nullptr, 0) != kOfNothing) {
    std::printf("the digest of nothing is another than it was: what is stored does not fit any more\n");
    pieces.wrong++;
  }
  for (const size_t border : kBorders)
    for (const size_t bytes : {border, border + 1, border == 0 ? 0 : border - 1})
      for (const size_t longest : {size_t{1}, size_t{7}, size_t{64}, size_t{255}, size_t{1024}, kLargest})
        if (bytes / longest < 5000) pieces.compare(bytes, longest);
  for (uint64_t left = std::strtoull(arguments[1], nullptr, 10); left > 0; left--) {
    const size_t bytes = pieces.below(kLargest);
    pieces.compare(bytes, bytes / 100 + pieces.below(kLargest));
  }
  std::printf("%llu contents in pieces%s, %llu wrong\n", static_cast<unsigned long long>(pieces.compared),
              understudy::xxh3::chosen == understudy::xxh3::Width::kAvx2 ? ", with AVX2 and without" : "",
              static_cast<unsigned long long>(pieces.wrong));
  return pieces.wrong != 0;
}
