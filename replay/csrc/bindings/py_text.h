#pragma once
#include <pybind11/pybind11.h>

#include <string>

namespace understudy::replay {

// A worker may write anything there, and a message that was cut may end within a character.
inline pybind11::str as_text(const std::string& bytes) {
  return pybind11::reinterpret_steal<pybind11::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

}  // namespace understudy::replay
