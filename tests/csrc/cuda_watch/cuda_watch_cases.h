// What the cases of cuda_watch_cases.cpp share: the library's functions, and what a case waits for.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/csrc/stand_in_cuda/stand_in.h"
#include "understudy/jit/csrc/cuda_watch/watch.h"

#define CHECK(condition)                                                 \
  if (!(condition)) {                                                    \
    std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
    std::_Exit(1);                                                       \
  }

constexpr auto kPatience = std::chrono::seconds(30);

template <typename Function>
Function* call(const char* name) {
  return reinterpret_cast<Function*>(
      dlsym(RTLD_DEFAULT, (std::string("understudy_cuda_watch_") + name).c_str()));
}

inline std::vector<StreamFacts> facts(Totals* totals = nullptr) {
  static auto* const ask = call<int(StreamFacts*, int, Totals*)>("facts");
  std::vector<StreamFacts> found(Watch::kStreams);
  Totals unused;
  found.resize(ask(found.data(), static_cast<int>(found.size()), totals != nullptr ? totals : &unused));
  return found;
}
inline Totals totals() {
  Totals found;
  facts(&found);
  return found;
}
inline void begin_save() { call<void()>("begin_save")(); }
inline void end_save() { call<void()>("end_save")(); }

inline void wait_until(const std::function<bool()>& condition, int line) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      std::fprintf(stderr, "line %d: did not come about\n", line);
      std::_Exit(1);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
#define EVENTUALLY(condition) wait_until([&] { return (condition); }, __LINE__)

inline Stream new_stream() {
  Stream stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, kNonBlocking) == kSuccess);
  return stream;
}
inline Event new_event() {
  Event event = nullptr;
  CHECK(cudaEventCreateWithFlags(&event, kDisableTiming) == kSuccess);
  return event;
}
inline NcclResult all_reduce(Stream stream) {
  return ncclAllReduce(nullptr, nullptr, 1, 7, 0, nullptr, stream);
}

// As PyTorch does: an event behind the collective, for which the default stream waits.
inline void hang_with_default_stream_waiting(Stream communication, Event event) {
  stand_in_gate(communication, true);
  CHECK(all_reduce(communication) == kNcclSuccess);
  CHECK(cudaEventRecord(event, communication) == kSuccess);
  CHECK(cudaStreamWaitEvent(nullptr, event, 0) == kSuccess);
}

using Cases = std::map<std::string, std::function<void()>>;
Cases cases_of_seeing();
Cases cases_of_saving();
#define CASE(name) {#name, name}
