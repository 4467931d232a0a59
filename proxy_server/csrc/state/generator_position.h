// States of the `cpu` driver's generators as CUDA shows its own: 16 bytes, a seed and an offset.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

namespace understudy::server {

constexpr uint64_t kBytesOfGeneratorState = 16;

// A Mersenne twister's state follows from its seed and from how many numbers it gave since. CPU generators
// keep no such count: it is found by running another one until both agree, from where one was found before.
//
// An offset counts fours of numbers, as who draws n numbers (DTensor's shards) moves it by n and may take two
// for each, and some more. Above it stand the rest of the count and, if the generator holds back the second
// of a pair of normal numbers, how many it gave since that pair, and one.
class GeneratorPositions {
 public:
  // (seed, offset). A normal number that was held back for long is given up: nobody could find it again.
  std::pair<uint64_t, uint64_t> state(at::CPUGeneratorImpl& generator);
  // Throws c10::Error for an offset that no generator gets to.
  void set(at::CPUGeneratorImpl& generator, uint64_t seed, uint64_t offset);

 private:
  struct Known {
    uint64_t seed, refills;
    at::mt19937 engine;  // where its numbers have just been made anew for the `refills`th time
  };

  uint64_t position(const at::mt19937& engine);
  at::mt19937 engine_at(uint64_t seed, uint64_t position) const;
  std::optional<uint64_t> given_since_pair(uint64_t seed, uint64_t position, double second) const;
  void learn(uint64_t seed, uint64_t refills, const at::mt19937& engine);

  std::deque<Known> known_;  // the newest last
};

}  // namespace understudy::server
