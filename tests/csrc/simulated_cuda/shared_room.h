// Room on one simulated GPU that several processes share: each has memory of its own, and all of them
// together no more than the GPU has. What a process had is free once it is gone.
#pragma once
#include <cstdint>
#include <string>

namespace understudy::simulated {

class SharedRoom {
 public:
  // `folder`: where the accounts of GPUs lie, by the name by which the process sees its own; "": nobody
  // shares it.
  SharedRoom(const std::string& folder, uint64_t bytes);
  ~SharedRoom();
  SharedRoom(const SharedRoom&) = delete;
  SharedRoom& operator=(const SharedRoom&) = delete;

  // Whether there was so much.
  bool take(uint64_t bytes);
  void give_back(uint64_t bytes);

 private:
  struct Account;
  Account* own();

  uint64_t bytes_;
  int file_ = -1;
  Account* accounts_ = nullptr;
};

}  // namespace understudy::simulated
