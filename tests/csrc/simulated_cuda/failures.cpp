#include "tests/csrc/simulated_cuda/failures.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "tests/csrc/simulated_cuda/settings.h"

namespace understudy::simulated {
namespace {

struct Wanted {
  std::atomic<uint64_t> left{0};  // until it comes up; 0: none is wanted
  std::atomic<int> code{0};
};

std::array<Wanted, kPlaces> wanted;
std::atomic<int> stuck{0};

constexpr int kMemoryAllocation = 2, kEccUncorrectable = 214, kUnknown = 999;

struct Text {
  int code;
  std::string_view name, words;
};

// As cudaGetErrorName() and cudaGetErrorString() of CUDA 13.0 say them.
constexpr Text kTexts[] = {
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {220, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {709, "cudaErrorContextIsDestroyed", "context is destroyed"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {714, "cudaErrorHardwareStackError", "hardware stack error"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {717, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"},
    {718, "cudaErrorInvalidPc", "invalid program counter"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {721, "cudaErrorTensorMemoryLeak", "tensor memory not completely freed"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const Text& text_of(int code) {
  for (const Text& text : kTexts)
    if (text.code == code) return text;
  return kTexts[std::size(kTexts) - 1];
}

bool outlives_the_call(int code) { return code >= 200; }

int due(Place place) {
  Wanted& here = wanted[static_cast<size_t>(place)];
  uint64_t left = here.left.load();
  while (left != 0 && !here.left.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1 ? here.code.load() : 0;
}

// What the file of this device says; none: there is no file.
std::optional<std::string> said_of_it() {
  if (settings().gone == nullptr) return std::nullopt;
  std::ifstream file(std::string(settings().gone) + "/" + visible_gpu());
  if (!file) return std::nullopt;
  std::string how;
  std::getline(file, how);
  return how;
}

// The same when this process first used it.
const std::optional<std::string>& said_at_first() {
  static const std::optional<std::string> said = said_of_it();
  return said;
}

void check_that_it_is_there() {
  const bool is_new = said_at_first().has_value();
  const std::optional<std::string> how = said_of_it();
  if (!how) return;
  while (how == "hangs") pause();
  if (how == "crashes") std::raise(SIGSEGV);
  if (how != "ecc" && how != "wrong") return stick(kUnknown, "it is gone");
  if (!is_new) stick(kEccUncorrectable, "its memory has an error");
}

}  // namespace

bool computes_wrongly() { return said_at_first() == "wrong"; }

void fail_at(Place place, uint64_t nth, int code) {
  Wanted& here = wanted[static_cast<size_t>(place)];
  here.code.store(code);
  here.left.store(nth);
}

void raise(int code) {
  if (code == kMemoryAllocation)  // as the caching allocator words it
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory, on demand.");
  const Text& text = text_of(code);
  std::string words = "CUDA error: ";
  words.append(text.words).append("\nSearch for `").append(text.name);
  words.append(
      "' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
      "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
      "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n");
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code, words);
}

void check(Place place) {
  check_that_it_is_there();
  if (const int code = stuck.load()) raise(code);
  const int code = due(place);
  if (code == 0) return;
  if (outlives_the_call(code)) stick(code, "on demand");
  raise(code);
}

int error_in_stream() { return due(Place::kInStream); }

bool error_sticks() { return stuck.load() != 0; }

void stick(int code, const std::string& why) {
  int none = 0;
  if (stuck.compare_exchange_strong(none, code))
    std::fprintf(stderr, "simulated CUDA device: error %d: %s\n", code, why.c_str());
}

}  // namespace understudy::simulated
