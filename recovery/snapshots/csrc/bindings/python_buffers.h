// Memory of Python objects, held while C++ works with it.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

namespace understudy::persistence {

// The contiguous memory of an object.  Made and destroyed with the GIL held; used with or without.
class BufferView {
 public:
  BufferView(pybind11::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw pybind11::error_already_set();
    held_ = true;
  }
  BufferView(BufferView&& other) noexcept : view_(other.view_), held_(std::exchange(other.held_, false)) {}
  BufferView& operator=(BufferView&&) = delete;
  ~BufferView() {
    if (held_) PyBuffer_Release(&view_);
  }

  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

}  // namespace understudy::persistence
