// Blocks that a device server's thread keeps, by the real KeptBlocks, as kernels and whoever else frees a
// tensor use them: each is full of its own bytes until it is freed, by this thread or by another.
//
//   kept_blocks ROUNDS SEED
//
// Ends with 1 and a sentence for what is wrong; AddressSanitizer sees to what is written behind a block, and
// LeakSanitizer to what never comes back.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "proxy_server/csrc/driver/kept_blocks.h"

namespace understudy::server {
namespace {

constexpr size_t kLargestSmall = 4096, kMostKept = 64;
constexpr std::array<size_t, 8> kUsual = {1, 4, 64, 65, 128, 2000, 4095, kLargestSmall};  // sizes come again

uint64_t wrong = 0;

void check(bool holds, const char* sentence) {
  if (holds) return;
  wrong++;
  std::printf("%s\n", sentence);
}

struct Owned {
  KeptBlocks::Block block;
  size_t bytes;
  uint8_t filling;

  void free() const {
    const auto* const memory = static_cast<const uint8_t*>(block.memory);
    for (size_t i = 0; i < bytes; i++)
      if (memory[i] != filling) return check(false, "a block was somebody else's, too");
    block.free(block.memory);
  }
};

class Owner {
 public:
  explicit Owner(uint64_t seed) : chance_(seed) {}

  void take_one() {
    const size_t bytes = below(2) == 0 ? kUsual[below(kUsual.size())] : 1 + below(kLargestSmall);
    const KeptBlocks::Block block = KeptBlocks::take(bytes);
    if (block.memory == nullptr) return check(false, "no block was given");
    check(reinterpret_cast<uintptr_t>(block.memory) % 64 == 0, "a block is not aligned");
    const auto filling = static_cast<uint8_t>(chance_());
    std::memset(block.memory, filling, bytes);
    owned_.push_back({block, bytes, filling});
  }

  std::vector<Owned> give_up(size_t count) {
    std::vector<Owned> given;
    while (given.size() < count && !owned_.empty()) {
      std::swap(owned_[below(owned_.size())], owned_.back());
      given.push_back(owned_.back());
      owned_.pop_back();
    }
    return given;
  }

  size_t below(size_t end) { return chance_() % end; }

 private:
  std::mt19937_64 chance_;
  std::vector<Owned> owned_;
};

void free_all(const std::vector<Owned>& blocks) {
  for (const Owned& one : blocks) one.free();
}

// Tensors of an executor are freed by other threads, too: that of a copier, or of whoever ends a session.
void free_elsewhere(const std::vector<Owned>& blocks, bool keeps_some_itself) {
  std::thread([&] {
    if (!keeps_some_itself) return free_all(blocks);
    const KeptBlocks own;
    free_all(blocks);
  }).join();
}

void any_order(Owner& owner, uint64_t rounds) {
  for (; rounds > 0; rounds--) {
    const size_t what = owner.below(200);
    if (what == 0)
      KeptBlocks::drop();
    else if (what < 3)
      free_elsewhere(owner.give_up(100), what == 2);
    else if (what < 80)
      free_all(owner.give_up(1 + owner.below(8)));
    else
      owner.take_one();
  }
  free_all(owner.give_up(~size_t{0}));
}

// A sanitizer's heap gives no address out again soon, so what comes back was kept.
void count_what_is_kept(size_t bytes) {
  KeptBlocks::drop();
  std::vector<KeptBlocks::Block> blocks(2 * kMostKept);
  std::set<void*> freed;
  for (auto& block : blocks) block = KeptBlocks::take(bytes);
  for (const auto& block : blocks) {
    freed.insert(block.memory);
    block.free(block.memory);
  }
  size_t back = 0;
  for (auto& block : blocks) {
    block = KeptBlocks::take(bytes);
    back += freed.count(block.memory);
  }
  for (const auto& block : blocks) block.free(block.memory);
  check(back == kMostKept, "another number of blocks was kept than is said");
}

void look_at_the_borders() {
  check(KeptBlocks::take(0).memory == nullptr, "nothing is a block");
  check(KeptBlocks::take(kLargestSmall + 1).memory == nullptr, "a large block is taken for a small one");
  std::thread([] {
    KeptBlocks::drop();
    check(KeptBlocks::take(64).memory == nullptr, "a thread that keeps no blocks has one");
  }).join();
}

void run(uint64_t rounds, uint64_t seed) {
  const KeptBlocks kept;
  look_at_the_borders();
  for (const size_t bytes : {size_t{1}, size_t{700}, kLargestSmall}) count_what_is_kept(bytes);
  Owner owner(seed);
  any_order(owner, rounds);
}

}  // namespace
}  // namespace understudy::server

int main(int, char** arguments) {
  using namespace understudy::server;
  const uint64_t rounds = std::strtoull(arguments[1], nullptr, 10);
  const uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
  std::thread([&] { run(rounds, seed); }).join();
  std::printf("%llu rounds, %llu wrong\n", static_cast<unsigned long long>(rounds),
              static_cast<unsigned long long>(wrong));
  return wrong != 0;
}
