// Errors of a driver that nothing in the process survives.
#pragma once
#include <c10/util/Exception.h>

#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace understudy::server {

// A call failed because of its driver or device and not (as far as can be told here) because of the program.
// `suspect`: the driver is not to be trusted any more, but its memory can still be read.
struct DriverError : std::runtime_error {
  explicit DriverError(const std::string& message, bool suspect = false)
      : std::runtime_error(message), suspect(suspect) {}
  bool suspect;
};

// An allocator has no memory left, of a device or the host.
bool out_of_memory(const c10::Error& error);

// Whether `message` is the driver's own: such a call is worth another attempt, on another server if need be.
bool driver_error(std::string_view message);

// The name of an error after which every further call of the driver fails in this process, so that only
// another device server can go on; empty if it is none. By its code, where PyTorch tells that, else by the
// text.
std::string_view sticky_error(const std::exception& error);
std::string_view sticky_error(std::string_view message);
// With their codes.
std::vector<std::pair<int, std::string_view>> sticky_errors();

// Whether it is that of a library that calls the driver for itself (cuDNN, cuFFT, cuSOLVER, NCCL) and does
// not say whose it is: the device is to be asked whether it still works.
bool library_error(std::string_view message);

}  // namespace understudy::server
