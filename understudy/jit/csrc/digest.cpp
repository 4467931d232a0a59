// The digest of a file that is a payload: XXH3-64, read and computed without the GIL.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "replay/csrc/digest/xxh3.h"

namespace {

constexpr size_t kPiece = 1 << 20;  // bytes; stays in a core's cache between the read and the digest

struct Found {
  uint64_t bytes = 0;
  uint64_t digest = 0;
  int error = 0;  // errno, of the read that failed
};

Found read_through(int file) {
  Found found;
  understudy::xxh3::Stream stream;
  const std::unique_ptr<char[]> piece(new char[kPiece]);
  while (true) {
    const ssize_t count = pread(file, piece.get(), kPiece, static_cast<off_t>(found.bytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) found.error = errno;
    if (count <= 0) break;
    stream.add(piece.get(), static_cast<size_t>(count));
    found.bytes += static_cast<uint64_t>(count);
  }
  found.digest = stream.value();
  return found;
}

std::pair<uint64_t, std::string> of_file(int file) {
  Found found;
  {
    const pybind11::gil_scoped_release release;
    found = read_through(file);
  }
  if (found.error != 0) {
    errno = found.error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw pybind11::error_already_set();
  }
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016" PRIx64, found.digest);
  return {found.bytes, text.data()};
}

}  // namespace

PYBIND11_MODULE(_digest, module) {
  module.doc() = "XXH3-64 of files.";
  module.def(
      "of_file", &of_file, pybind11::arg("file"),
      "Bytes of an open file, from its beginning to its end, and the digest of these in 16 hexadecimal "
      "digits. Raises OSError.");
}
