// Errors of the simulated device: on demand, and those of its kernels. As CUDA's, they outlive the call.
#pragma once
#include <cstdint>
#include <string>

namespace understudy::simulated {

// Where one is to come up, and what is counted for it.
enum class Place : int { kLaunch, kSynchronize, kInStream, kAllocate };
inline constexpr int kPlaces = 4;

// The `nth` from now on at that place has this error (a cudaError_t).
void fail_at(Place place, uint64_t nth, int code);
// To be called at each of them: throws c10::AcceleratorError if it is to fail, or if an error sticks. A
// device is gone for all processes once the folder of SIMULATED_CUDA_GONE has a file of its name, as
// CUDA_VISIBLE_DEVICES gives it: then it throws, or does what the file says:
//   hangs     it never returns
//   crashes   it ends the process, of SIGSEGV
//   ecc       it has had an ECC error: for those that used it before; later ones find it sound
//   wrong     the same, and for later ones it computes wrongly
void check(Place place);
// Whether a bit of each kernel's result is to be another one.
bool computes_wrongly();
// An item of a stream has failed: every call from here on says so.
void stick(int code, const std::string& why);
bool error_sticks();
// For items of streams, which cannot throw: the error of this one, or 0.
int error_in_stream();

[[noreturn]] void raise(int code);

}  // namespace understudy::simulated
