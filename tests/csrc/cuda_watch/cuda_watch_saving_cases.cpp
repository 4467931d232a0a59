// Cases about saves, of cuda_watch_cases.
#include <array>
#include <atomic>
#include <cstdio>
#include <thread>

#include "tests/csrc/cuda_watch/cuda_watch_cases.h"

namespace {

// Works without the library too, where the copy blocks: the test sees that.
void a_save_copies_although_the_default_stream_hangs() {
  const Stream communication = new_stream();
  hang_with_default_stream_waiting(communication, new_event());
  std::array<char, 64> device, host{};
  device.fill('x');
  std::puts("copying");
  std::fflush(stdout);
  if (auto* const begin = call<void()>("begin_save")) begin();
  CHECK(cudaMemcpy(host.data(), device.data(), host.size(), 2) == kSuccess);
  CHECK(host == device);
  host.fill(0);
  CHECK(cudaMemcpyAsync(host.data(), device.data(), host.size(), 2, nullptr) == kSuccess);
  CHECK(cudaStreamSynchronize(nullptr) == kSuccess);
  CHECK(host == device && cudaStreamQuery(nullptr) == kSuccess);
  CHECK(cudaMemsetAsync(device.data(), 'y', device.size(), communication) == kSuccess);
  CHECK(cudaMemcpy_ptds(host.data(), device.data(), host.size(), 2) == kSuccess && host == device &&
        host[0] == 'y');
  const Event copied = new_event();
  CHECK(cudaEventRecord(copied, nullptr) == kSuccess);
  CHECK(cudaDeviceSynchronize() == kSuccess);
  CHECK(cudaEventQuery(copied) == kSuccess);
  CHECK(stand_in_counters().device_synchronizations == 0);
  CHECK(totals().copies_of_saves == 4 && facts()[0].ended == 0);
  end_save();
  CHECK(cudaMemcpyAsync(host.data(), device.data(), host.size(), 2, nullptr) == kSuccess);
  CHECK(cudaStreamQuery(nullptr) == kNotReady && cudaGetLastError() == kNotReady);
  CHECK(totals().copies_of_saves == 4);
}

void copies_of_other_threads_go_where_they_went() {
  const Stream communication = new_stream();
  hang_with_default_stream_waiting(communication, new_event());
  begin_save();
  std::thread([] {
    char to = 0, from = 'x';
    CHECK(cudaMemcpyAsync(&to, &from, 1, 2, nullptr) == kSuccess);
    CHECK(cudaStreamQuery(nullptr) == kNotReady);
    const Stream own = new_stream();
    CHECK(cudaMemcpyAsync(&to, &from, 1, 2, own) == kSuccess && cudaStreamSynchronize(own) == kSuccess &&
          to == 'x');
    stand_in_gate(nullptr, false);
  }).join();
  CHECK(totals().copies_of_saves == 0);
}

void a_save_of_one_device_uses_no_other() {
  CHECK(cudaSetDevice(1) == kSuccess);
  const Stream communication = new_stream();
  CHECK(all_reduce(communication) == kNcclSuccess);
  EVENTUALLY(facts()[0].ended == 1);
  CHECK(facts()[0].device == 1);
  std::thread([] {  // its own device is number 0
    begin_save();
    const Stream own = call<Stream(int)>("save_stream")(1);
    CHECK(own != nullptr && own == call<Stream(int)>("save_stream")(1));
    char to = 0, from = 'x';
    CHECK(cudaMemcpy(&to, &from, 1, 2) == kSuccess && to == 'x');
    CHECK(call<Stream(int)>("save_stream")(-1) == nullptr &&
          call<Stream(int)>("save_stream")(1000) == nullptr);
    end_save();
  })
      .join();
  CHECK(stand_in_counters().contexts == 1u << 1);
}

void a_save_knows_whether_the_device_has_come_to_the_end_of_the_step() {
  auto* const boundary = call<int(int, Stream)>("boundary");
  auto* const reached = call<Error(int)>("boundary_reached");
  const Stream compute = new_stream();
  CHECK(reached(0) == kSuccess && reached(1) == kSuccess);
  stand_in_gate(compute, true);
  stand_in_gated(compute);
  CHECK(boundary(0, compute) == 1 && reached(0) == kNotReady && reached(1) == kSuccess);
  CHECK(cudaGetLastError() == kSuccess);
  auto* const is_idle = call<Error(Stream)>("is_idle");
  CHECK(is_idle(compute) == kNotReady && cudaGetLastError() == kSuccess);
  stand_in_gate(compute, false);
  EVENTUALLY(reached(0) == kSuccess && is_idle(compute) == kSuccess);
  stand_in_capture(compute, true);
  CHECK(boundary(0, compute) == 0 && reached(0) == -1);
  stand_in_capture(compute, false);
  CHECK(boundary(0, compute) == 1);
  EVENTUALLY(reached(0) == kSuccess);
  CHECK(boundary(-1, compute) == 0 && boundary(1000, compute) == 0);
}

void settling_waits_for_a_collective_and_for_nothing_else() {
  auto* const settle = call<Error(Stream)>("settle");
  const Stream compute = new_stream(), communication = new_stream();
  stand_in_gate(compute, true);
  stand_in_gated(compute);
  CHECK(settle(compute) == kSuccess);  // no collective is under way
  stand_in_gate(compute, false);
  stand_in_gate(communication, true);
  CHECK(all_reduce(communication) == kNcclSuccess);
  const Event event = new_event();
  CHECK(cudaEventRecord(event, communication) == kSuccess &&
        cudaStreamWaitEvent(compute, event, 0) == kSuccess);
  stand_in_capture(compute, true);
  CHECK(settle(compute) == kSuccess);
  stand_in_capture(compute, false);
  std::atomic<bool> settled{false};
  std::thread trains([&] {
    CHECK(settle(compute) == kSuccess);
    settled = true;
  });
  EVENTUALLY(facts()[0].oldest > 0.05);
  CHECK(!settled);
  stand_in_gate(communication, false);
  trains.join();
  CHECK(settled);
}

}  // namespace

Cases cases_of_saving() {
  return {
      CASE(a_save_copies_although_the_default_stream_hangs),
      CASE(copies_of_other_threads_go_where_they_went),
      CASE(a_save_of_one_device_uses_no_other),
      CASE(a_save_knows_whether_the_device_has_come_to_the_end_of_the_step),
      CASE(settling_waits_for_a_collective_and_for_nothing_else),
  };
}
