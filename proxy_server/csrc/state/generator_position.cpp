#include "proxy_server/csrc/state/generator_position.h"

#include <ATen/core/DistributionsHelper.h>

#include <algorithm>
#include <vector>

#include "replay/csrc/log/log_map.h"

namespace understudy::server {
namespace {

constexpr uint64_t kNumbers = at::MERSENNE_STATE_N;  // made at a time
constexpr uint64_t kUnit = 4;
constexpr int kUnitBits = 42, kRestBits = 2;  // of an offset, from below
constexpr uint64_t kMostUnits = 1ull << kUnitBits, kMostPositions = kUnit * kMostUnits;
constexpr uint64_t kNumbersOfPair = 4;  // two uniform numbers of 64 bits
constexpr uint64_t kLongestSince = (1ull << (64 - kUnitBits - kRestBits)) - 2;
constexpr uint64_t kMostToRun = 1ull << 37;  // a generator that is set: minutes of running
constexpr size_t kMostKnown = 64, kStarts = 4;

void refill(at::mt19937& engine) {
  at::mt19937_data_pod data = engine.data();
  data.left_ = 1;
  engine.set_data(data);
  engine();
}

bool have_the_same_numbers(const at::mt19937& a, const at::mt19937& b) {
  return a.data().state_ == b.data().state_;
}

uint64_t refills_at(uint64_t position) { return (position + kNumbers - 1) / kNumbers; }

// What normal_distribution draws from: numbers that are known.
struct Given {
  const uint32_t* next;
  std::optional<double> second{};
  uint32_t random() { return *next++; }
  uint64_t random64() {
    const uint64_t high = random();
    return high << 32 | random();
  }
  std::optional<double> next_double_normal_sample() { return second; }
  void set_next_double_normal_sample(std::optional<double> sample) { second = sample; }
};

double second_of_pair(const uint32_t* numbers) {
  Given given{numbers};
  at::normal_distribution<double>(0, 1)(&given);
  return *given.second;
}

}  // namespace

void GeneratorPositions::learn(uint64_t seed, uint64_t refills, const at::mt19937& engine) {
  known_.push_back({seed, refills, engine});
  if (known_.size() > kMostKnown) known_.pop_front();
}

uint64_t GeneratorPositions::position(const at::mt19937& engine) {
  const at::mt19937_data_pod data = engine.data();
  const uint64_t seed = data.seed_;
  std::vector<std::pair<uint64_t, at::mt19937>> starts{{0, at::mt19937(seed)}};
  for (auto known = known_.rbegin(); known != known_.rend(); ++known) {
    if (known->seed != seed) continue;
    if (have_the_same_numbers(known->engine, engine)) return (known->refills - 1) * kNumbers + data.next_;
    if (starts.size() < kStarts) starts.emplace_back(known->refills, known->engine);
  }
  if (have_the_same_numbers(starts[0].second, engine)) return 0;
  for (uint64_t steps = 0; steps < kMostPositions / kNumbers; steps++)
    for (auto& [refills, candidate] : starts) {
      refill(candidate);
      refills++;
      if (have_the_same_numbers(candidate, engine)) {
        learn(seed, refills, candidate);
        return (refills - 1) * kNumbers + data.next_;
      }
    }
  throw replay::LogError("a generator is in a state that its seed does not lead to");
}

at::mt19937 GeneratorPositions::engine_at(uint64_t seed, uint64_t position) const {
  at::mt19937 engine(seed);
  if (position == 0) return engine;
  const uint64_t wanted = refills_at(position);
  uint64_t refills = 0;
  for (const Known& known : known_)
    if (known.seed == seed && known.refills <= wanted && known.refills > refills)
      refills = known.refills, engine = known.engine;
  for (; refills < wanted; refills++) refill(engine);
  at::mt19937_data_pod data = engine.data();
  data.next_ = static_cast<uint32_t>(position - (wanted - 1) * kNumbers);
  data.left_ = static_cast<int>(kNumbers + 1 - data.next_);
  engine.set_data(data);
  return engine;
}

std::optional<uint64_t> GeneratorPositions::given_since_pair(uint64_t seed, uint64_t position,
                                                             double second) const {
  if (position < kNumbersOfPair) return std::nullopt;
  const uint64_t begin = position - std::min(position, kNumbersOfPair + kLongestSince);
  at::mt19937 engine = engine_at(seed, begin);
  std::vector<uint32_t> numbers(position - begin);
  for (uint32_t& number : numbers) number = engine();
  for (uint64_t since = 0; since + kNumbersOfPair <= numbers.size(); since++)
    if (second_of_pair(numbers.data() + numbers.size() - kNumbersOfPair - since) == second) return since;
  return std::nullopt;
}

std::pair<uint64_t, uint64_t> GeneratorPositions::state(at::CPUGeneratorImpl& generator) {
  const at::mt19937 engine = generator.engine();
  const uint64_t seed = engine.seed();
  const uint64_t position = this->position(engine);
  uint64_t offset = position / kUnit | position % kUnit << kUnitBits;
  generator.set_next_float_normal_sample(std::nullopt);
  if (const auto second = generator.next_double_normal_sample()) {
    if (const auto since = given_since_pair(seed, position, *second))
      offset |= (*since + 1) << (kUnitBits + kRestBits);
    else
      generator.set_next_double_normal_sample(std::nullopt);
  }
  return {seed, offset};
}

void GeneratorPositions::set(at::CPUGeneratorImpl& generator, uint64_t seed, uint64_t offset) {
  const uint64_t position = offset % kMostUnits * kUnit + (offset >> kUnitBits) % kUnit;
  const uint64_t since = offset >> (kUnitBits + kRestBits);
  TORCH_CHECK(position < kMostToRun && (since == 0 || position + 1 >= since + kNumbersOfPair),
              "Invalid offset of a generator: ", offset);
  const at::mt19937 engine = engine_at(seed, position);
  std::optional<double> second;
  if (since != 0) {
    at::mt19937 before = engine_at(seed, position - (since - 1) - kNumbersOfPair);
    std::array<uint32_t, kNumbersOfPair> numbers{};
    for (uint32_t& number : numbers) number = before();
    second = second_of_pair(numbers.data());
  }
  if (position != 0) {
    at::mt19937 start = engine;  // as it is known: just made anew
    at::mt19937_data_pod data = start.data();
    data.next_ = 1, data.left_ = static_cast<int>(kNumbers);
    start.set_data(data);
    learn(seed, refills_at(position), start);
  }
  generator.set_engine(engine);
  generator.set_next_float_normal_sample(std::nullopt);
  generator.set_next_double_normal_sample(second);
}

}  // namespace understudy::server
