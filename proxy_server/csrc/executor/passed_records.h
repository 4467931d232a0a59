// How far the device has come: a script that waits for an event waits for what is in front of it on its
// stream, and for no more.
//
// A processor has done a record when the executor has. Into a GPU's streams the executor puts a mark behind
// some of the records, once anybody has asked for an event, and looks now and then which of them they have
// passed.
#pragma once
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "proxy_server/csrc/driver/driver.h"
#include "replay/csrc/log/control_page.h"

namespace understudy::server {

class PassedRecords {
 public:
  PassedRecords(replay::ServerPage page, const Driver& driver) : page_(page), driver_(driver) {}

  // All records before `index` have been given to the device.
  void given(uint64_t index) {
    if (__builtin_expect(driver_.device().is_cuda(), 0)) return given_to_gpu(index);
    page_.server().passed_index.store(index, std::memory_order_relaxed);
    const uint64_t awaited = page_.worker().awaited_index.load(std::memory_order_relaxed);
    if (__builtin_expect(awaited != 0, 0) && awaited <= index) tell();
  }
  // Nothing more comes for now. Whether somebody waits for a mark that the device has yet to pass: then this
  // is to be called again soon.
  bool idle(uint64_t index);
  // Execution goes on at `index`.
  void stand_at(uint64_t index);
  // Somebody has waited until the device had done all records before `index`, or those of the current stream.
  void all_passed(uint64_t index);
  void current_passed(uint64_t index);

 private:
  struct Mark {
    uint64_t index;
    c10::Event event;
  };
  struct OfStream {
    std::deque<Mark> marks;  // the oldest first
    uint64_t marked = 0;     // of the newest
    uint64_t passed = 0;
  };
  void given_to_gpu(uint64_t index);
  void mark(uint64_t index);
  void look();
  void tell();
  void forget(const std::exception& why);
  void publish(size_t place, uint64_t passed);

  const replay::ServerPage page_;
  const Driver& driver_;
  bool wanted_ = false;
  std::array<OfStream, replay::kStreams> streams_;
  std::vector<c10::Event> spare_;
};

}  // namespace understudy::server
