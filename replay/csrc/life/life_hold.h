// Holds the word of a control page by which proxyd learns at once that this process has died (life_word.h).
//
// The kernel marks words on the robust list of a thread that ends, and a thread has one list. This one is of
// a thread of our own that does nothing else: libc's lists stay as they are, whatever the executor runs in
// libraries, and the links lie in private memory. Those of a pthread mutex would lie beside the word, where a
// worker that is out of its mind could lead this process by them.
#pragma once
#include <linux/futex.h>

#include <atomic>
#include <cstdint>
#include <thread>

namespace understudy::replay {

class LifeHold {
 public:
  LifeHold();
  ~LifeHold();  // lets go
  LifeHold(const LifeHold&) = delete;
  LifeHold& operator=(const LifeHold&) = delete;
  // Instead of any other one; also when another server has taken it meanwhile. It must stay mapped.
  void hold(std::atomic<uint32_t>& word);
  void let_go();  // unless another one has taken it

 private:
  void run();

  robust_list_head head_{};
  robust_list link_{};
  std::atomic<uint32_t>* word_ = nullptr;
  std::atomic<uint32_t> thread_id_{0};  // 0: not known yet
  std::atomic<uint32_t> stop_{0};
  bool kept_ = true;  // the kernel has taken the list
  std::thread thread_;
};

}  // namespace understudy::replay
