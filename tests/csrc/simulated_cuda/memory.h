// Memory of one simulated device: the host's, at addresses that the host cannot read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "tests/csrc/simulated_cuda/shared_room.h"

namespace understudy::simulated {

class Memory {
 public:
  explicit Memory(uint64_t bytes);

  // Addresses of it begin on 512 bytes, as those of CUDA; none where there is no room. What it holds is
  // poison.
  void* take(uint64_t bytes);
  // Of what take() answered. What it holds becomes poison.
  void give_back(void* address);
  void poison(void* address, uint64_t bytes);
  // Where kernels find what is at that address of the device.
  void* for_kernels(const void* address) const;
  bool holds(const void* address) const;

  struct Counts {
    uint64_t blocks = 0, bytes = 0, most_blocks = 0, most_bytes = 0, taken_blocks = 0, taken_bytes = 0;
  };
  Counts counts() const;
  void forget_most();
  void forget_taken();
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_;
  SharedRoom room_;
  uint8_t *device_, *kernels_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_, used_;  // offset -> bytes
  Counts counts_;
};

}  // namespace understudy::simulated
