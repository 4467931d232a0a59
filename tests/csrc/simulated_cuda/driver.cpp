// What the stand-in for libcuda.so.1 (tests/csrc/simulated_driver.cpp) has a stream do: our code for GPUs, as
// a host runs it.
#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <string_view>
#include <vector>

#include "replay/csrc/digest/piece_digest.h"
#include "tests/csrc/simulated_cuda/failures.h"
#include "tests/csrc/simulated_cuda/runtime.h"

namespace understudy::simulated {
namespace {

namespace piece = replay::piece;

constexpr int kLaunchFailed = 719, kNotFound = 500;

template <class Value>
Value argument(void** arguments, size_t place) {
  Value value;
  std::memcpy(&value, arguments[place], sizeof value);
  return value;
}

template <class Value>
Value* for_kernels(Value* address) {
  return static_cast<Value*>(memory(current_device()).for_kernels(address));
}

uint64_t digest_of(const uint8_t* content, uint64_t bytes, const piece::Keys& keys) {
  std::vector<uint8_t> filled(piece::kBytes);
  std::memcpy(filled.data(), content, std::min<uint64_t>(bytes, piece::kBytes));
  uint64_t sum = 0;
  for (unsigned thread = 0; thread < piece::kThreads; thread++)
    sum += piece::part(thread, keys, [&](unsigned stripe, uint64_t& first, uint64_t& second) {
      std::memcpy(&first, &filled[piece::kStripe * stripe + 16 * thread], 8);
      std::memcpy(&second, &filled[piece::kStripe * stripe + 16 * thread + 8], 8);
    });
  return piece::finish(sum);
}

void piece_digests(void** arguments) {
  const auto* const rows = for_kernels(argument<piece::Row*>(arguments, 0));
  const auto count = argument<unsigned>(arguments, 1);
  const auto keys = argument<piece::Keys>(arguments, 3);
  auto* const leaves = for_kernels(argument<uint64_t*>(arguments, 4));
  const Memory& here = memory(current_device());
  counters().digest_launches++;
  current_stream().enqueue([=, &here] {
    for (unsigned i = 0; i < count; i++) {
      counters().digested += rows[i].bytes;
      const auto* const content = static_cast<const uint8_t*>(here.for_kernels(rows[i].content));
      uint64_t* leaf = leaves + rows[i].first;
      for (uint64_t at = 0; at < rows[i].bytes; at += piece::kBytes)
        *leaf++ = digest_of(content + at, rows[i].bytes - at, keys);
    }
  });
}

void gather(unsigned blocks, void** arguments) {
  const auto* const rows = for_kernels(argument<piece::Row*>(arguments, 0));
  auto* const gathered = for_kernels(argument<uint8_t*>(arguments, 1));
  const Memory& here = memory(current_device());
  current_stream().enqueue([=, &here] {
    for (unsigned i = 0; i < blocks; i++) {
      counters().digested += rows[i].bytes;
      if (rows[i].bytes != 0)
        std::memcpy(gathered + rows[i].first, here.for_kernels(rows[i].content), rows[i].bytes);
    }
  });
}

}  // namespace
}  // namespace understudy::simulated

// A CUresult.
extern "C" int simulated_driver_launch(const char* name, unsigned blocks, void** arguments) {
  namespace simulated = understudy::simulated;
  try {
    simulated::check(simulated::Place::kLaunch);
  } catch (const std::exception&) {
    return simulated::kLaunchFailed;
  }
  simulated::counters().launches++;
  if (std::string_view(name) == "piece_digests")
    simulated::piece_digests(arguments);
  else if (std::string_view(name) == "gather")
    simulated::gather(blocks, arguments);
  else
    return simulated::kNotFound;
  return 0;
}
