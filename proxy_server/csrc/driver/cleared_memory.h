// Memory as kernels get it is what its last owner left, and some kernels leave bytes of their results
// unwritten: those would be other bytes in each execution of a record, though nothing went wrong.
#pragma once

namespace understudy::server {

// Makes PyTorch's CPU allocator one that can clear. Once a process; harmless if called again.
void install_clearing_allocator();

// While it lives, what this thread allocates is zero.
class ClearedMemory {
 public:
  explicit ClearedMemory(bool wanted);
  ~ClearedMemory();
  ClearedMemory(const ClearedMemory&) = delete;
  ClearedMemory& operator=(const ClearedMemory&) = delete;

 private:
  const bool before_;
};

}  // namespace understudy::server
