// What understudy's library for LD_PRELOAD sees and does, case by case, on the STAND-IN of stand_in_cuda/.
//
//   LD_PRELOAD=.../libunderstudy_cuda_watch.so cuda_watch_cases NAME
//
// Prints `NAME: ok`, or ends with status 1 and the line of what does not hold.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/csrc/cuda_watch/cuda_watch_cases.h"

namespace {

void counts_move() {
  const Stream stream = new_stream();
  CHECK(facts().empty());
  for (int n = 0; n < 10; n++) CHECK(all_reduce(stream) == kNcclSuccess);
  CHECK(facts().size() == 1 && facts()[0].begun == 10);
  CHECK(facts()[0].stream == reinterpret_cast<std::uintptr_t>(stream));
  EVENTUALLY(facts()[0].ended == 10);
  CHECK(facts()[0].oldest == 0 && totals().nccl_calls == 10 && totals().unmarked == 0);
  CHECK(cudaGetLastError() == kSuccess);
}

void a_hung_collective_stands_still_on_its_stream_alone() {
  const Stream hung = new_stream(), other = new_stream();
  CHECK(all_reduce(hung) == kNcclSuccess);
  EVENTUALLY(facts()[0].ended == 1);
  stand_in_gate(hung, true);
  CHECK(all_reduce(hung) == kNcclSuccess);
  for (int n = 0; n < 5; n++) CHECK(all_reduce(other) == kNcclSuccess);
  EVENTUALLY(facts()[1].ended == 5);
  EVENTUALLY(facts()[0].oldest > 0.02);
  CHECK(facts()[0].begun == 2 && facts()[0].ended == 1 && facts()[1].oldest == 0);
  stand_in_gate(hung, false);
  EVENTUALLY(facts()[0].ended == 2);
  CHECK(totals().query_error == 0);
}

void a_compute_stream_that_waits_is_seen() {
  const Stream communication = new_stream();
  const Event event = new_event(), elsewhere = new_event();
  CHECK(all_reduce(communication) == kNcclSuccess);
  CHECK(cudaEventRecord(elsewhere, nullptr) == kSuccess);
  CHECK(cudaStreamWaitEvent(communication, elsewhere, 0) == kSuccess);
  CHECK(facts()[0].waits == 0);
  hang_with_default_stream_waiting(communication, event);
  CHECK(cudaStreamWaitEvent(communication, event, 0) == kSuccess);  // its own order: no wait
  CHECK(facts()[0].waits == 1 && facts()[0].waiting == 1);
  stand_in_gate(communication, false);
  EVENTUALLY(facts()[0].waiting == 0);
  CHECK(facts()[0].waits == 1);
}

void destroyed_and_reused_events_mean_nothing_old() {
  const Stream communication = new_stream(), other = new_stream();
  const Event event = new_event();
  stand_in_gate(communication, true);
  CHECK(all_reduce(communication) == kNcclSuccess);
  CHECK(cudaEventRecord(event, communication) == kSuccess);
  CHECK(cudaEventDestroy(event) == kSuccess);
  const Event again = new_event();
  CHECK(again == event);  // the stand-in gives the same handle
  CHECK(cudaStreamWaitEvent(nullptr, again, 0) == kSuccess);
  CHECK(facts()[0].waits == 0);
  CHECK(cudaEventRecord(again, communication) == kSuccess);
  CHECK(cudaEventRecord(again, other) == kSuccess);  // recorded anew, elsewhere
  EVENTUALLY(cudaEventQuery(again) == kSuccess);
  CHECK(cudaStreamWaitEvent(nullptr, again, 0) == kSuccess);
  CHECK(facts()[0].ended == 0 && facts()[0].waits == 0);
  stand_in_gate(communication, false);
  EVENTUALLY(facts()[0].ended == 1);
  CHECK(stand_in_counters().uses_of_destroyed_events == 0);
}

void what_the_script_sees_by_cudaEventQuery_counts() {
  const Stream communication = new_stream();
  const Event event = new_event();
  stand_in_blind_others(true);
  for (int n = 0; n < 3; n++) CHECK(all_reduce(communication) == kNcclSuccess);
  CHECK(cudaEventRecord(event, communication) == kSuccess);
  CHECK(all_reduce(communication) == kNcclSuccess);
  CHECK(cudaStreamSynchronize(communication) == kSuccess);
  CHECK(facts()[0].ended == 0);
  CHECK(cudaEventQuery(event) == kSuccess);
  CHECK(facts()[0].ended == 3);
  stand_in_blind_others(false);
  EVENTUALLY(facts()[0].ended == 4);
}

void a_capture_is_neither_recorded_into_nor_broken() {
  const Stream captured = new_stream(), other = new_stream();
  stand_in_gate(other, true);
  CHECK(all_reduce(other) == kNcclSuccess);
  stand_in_capture(captured, true);  // global: calls of other threads break it
  CHECK(all_reduce(captured) == kNcclSuccess);
  CHECK(all_reduce(other) == kNcclSuccess);
  stand_in_gate(other, false);
  EVENTUALLY(facts()[0].ended == 2);
  stand_in_capture(captured, false);
  const StandInCounters seen = stand_in_counters();
  CHECK(seen.records_while_capturing == 0 && seen.captures_broken == 0);
  CHECK(facts().size() == 1 && totals().captured == 1 && totals().nccl_calls == 3);
  CHECK(all_reduce(captured) == kNcclSuccess);
  EVENTUALLY(facts()[1].ended == 1);
  stand_in_capture(captured, true);  // a stream that is watched already
  const Event event = new_event();
  CHECK(cudaEventRecord(event, captured) == kSuccess && all_reduce(captured) == kNcclSuccess);
  CHECK(stand_in_counters().records_while_capturing == 1);  // the script's own
  CHECK(cudaStreamWaitEvent(nullptr, event, 0) == kSuccess);
  CHECK(facts()[1].begun == 1 && facts()[1].waits == 0);
}

void a_thousand_collectives_in_flight_take_no_more_events_than_a_ring_has() {
  const Stream stream = new_stream();
  stand_in_gate(stream, true);
  const auto before = stand_in_counters().events_created;
  for (int n = 0; n < 1000; n++) CHECK(all_reduce(stream) == kNcclSuccess);
  CHECK(stand_in_counters().events_created - before == 64);
  CHECK(facts()[0].begun == 1000 && facts()[0].ended == 0 && facts()[0].moved_marks == 936);
  stand_in_gate(stream, false);
  EVENTUALLY(facts()[0].ended == 1000);
  for (int n = 0; n < 100; n++) CHECK(all_reduce(stream) == kNcclSuccess);
  EVENTUALLY(facts()[0].ended == 1100);
  CHECK(stand_in_counters().events_created - before == 64);
}

void eight_threads_at_once() {
  std::atomic<bool> over{false};
  std::thread watchdog([&over] {  // as Python's: it reads, and calls nothing of CUDA's
    while (!over.load(std::memory_order_relaxed)) CHECK(facts().size() <= 8);
  });
  std::vector<std::thread> threads;
  for (int n = 0; n < 8; n++)
    threads.emplace_back([n] {
      const Stream stream = new_stream();
      for (int round = 0; round < 200; round++) {
        const Event event = new_event();
        if (n == 0) begin_save();
        char to = 0, from = 'x';
        if (n == 0) CHECK(cudaMemcpy(&to, &from, 1, 2) == kSuccess && to == 'x');
        if (n == 0) end_save();
        CHECK(all_reduce(stream) == kNcclSuccess);
        CHECK(cudaEventRecord(event, stream) == kSuccess);
        CHECK(cudaStreamWaitEvent(nullptr, event, 0) == kSuccess);
        cudaEventQuery(event);
        CHECK(cudaEventDestroy(event) == kSuccess);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(facts().size() == 8);
  for (int n = 0; n < 8; n++) {
    EVENTUALLY(facts()[n].ended == 200);
    CHECK(facts()[n].begun == 200 && facts()[n].waits == 200);
  }
  over = true;
  watchdog.join();
  CHECK(totals().copies_of_saves == 200 && stand_in_counters().uses_of_destroyed_events == 0);
}

void a_forked_child_is_not_watched() {
  const Stream stream = new_stream();
  CHECK(all_reduce(stream) == kNcclSuccess);
  EVENTUALLY(facts()[0].ended == 1);
  stand_in_gate(stream, true);
  CHECK(all_reduce(stream) == kNcclSuccess);
  const pid_t child = fork();
  if (child == 0) {
    CHECK(facts().empty() && totals().nccl_calls == 0);
    CHECK(all_reduce(stream) == kNcclSuccess && cudaEventRecord(new_event(), stream) == kSuccess);
    begin_save();
    CHECK(facts().empty() && call<Stream(int)>("save_stream")(0) == nullptr);
    std::exit(7);  // with all that runs at an exit
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
  CHECK(facts()[0].begun == 2 && facts()[0].ended == 1);
  stand_in_gate(stream, false);
  EVENTUALLY(facts()[0].ended == 2);
}

void a_group_counts_when_it_ends() {
  const Stream first = new_stream(), second = new_stream();
  const auto before = stand_in_counters().events_created;
  CHECK(ncclGroupStart() == kNcclSuccess && ncclGroupStart() == kNcclSuccess);
  CHECK(ncclSend(nullptr, 1, 7, 1, nullptr, first) == kNcclSuccess);
  CHECK(ncclRecv(nullptr, 1, 7, 1, nullptr, first) == kNcclSuccess);
  CHECK(ncclGroupEnd() == kNcclSuccess);
  CHECK(all_reduce(second) == kNcclSuccess);
  CHECK(facts()[0].begun == 2 && facts()[1].begun == 1 && facts()[0].oldest > 0);
  CHECK(stand_in_counters().events_created == before);
  CHECK(ncclGroupEnd() == kNcclSuccess);
  EVENTUALLY(facts()[0].ended == 2 && facts()[1].ended == 1);
  CHECK(stand_in_counters().events_created == before + 2);
}

void a_call_in_progress_counts_behind_the_event_of_the_script() {
  const Stream stream = new_stream(), other = new_stream();
  const Event event = new_event();
  stand_in_nccl_returns(kNcclInProgress);
  CHECK(all_reduce(stream) == kNcclInProgress);
  stand_in_nccl_returns(kNcclSuccess);
  CHECK(all_reduce(other) == kNcclSuccess);
  EVENTUALLY(facts()[1].ended == 1);  // both were looked at
  CHECK(facts()[0].begun == 1 && facts()[0].ended == 0 && facts()[0].oldest > 0);
  stand_in_gate(stream, true);
  stand_in_nccl_progresses();
  CHECK(cudaEventRecord(event, stream) == kSuccess && cudaStreamWaitEvent(nullptr, event, 0) == kSuccess);
  CHECK(facts()[0].ended == 0 && facts()[0].waiting == 1);
  stand_in_gate(stream, false);
  EVENTUALLY(facts()[0].ended == 1 && facts()[0].waiting == 0);
}

void a_call_that_hangs_in_the_host_has_not_ended() {
  const Stream stream = new_stream();
  stand_in_nccl_hangs(true);
  std::thread caller([stream] { CHECK(all_reduce(stream) == kNcclSuccess); });
  EVENTUALLY(facts().size() == 1 && facts()[0].begun == 1 && facts()[0].oldest > 0.02);
  CHECK(all_reduce(stream) == kNcclSuccess);  // another thread's, which does not hide it
  EVENTUALLY(facts()[0].ended == 1);
  CHECK(facts()[0].begun == 2 && facts()[0].oldest > 0);
  stand_in_nccl_hangs(false);
  caller.join();
  EVENTUALLY(facts()[0].ended == 2);
}

void calls_that_fail_leave_nothing_behind() {
  const Stream stream = new_stream();
  stand_in_nccl_returns(5);
  CHECK(all_reduce(stream) == 5);
  EVENTUALLY(facts()[0].ended == 1);
  stand_in_nccl_returns(kNcclSuccess);
  stand_in_raise(700);  // the script has not asked about it yet: none of ours may hide it
  CHECK(all_reduce(stream) == kNcclSuccess);
  CHECK(cudaPeekAtLastError() == 700 && totals().unmarked == 1);
  CHECK(facts()[0].begun == 2 && facts()[0].ended == 2);
  CHECK(cudaGetLastError() == 700 && all_reduce(stream) == kNcclSuccess);
  EVENTUALLY(facts()[0].ended == 3);
  stand_in_refuse_records(true);
  CHECK(all_reduce(stream) == kNcclSuccess && cudaGetLastError() == kSuccess);
  CHECK(facts()[0].ended == 4 && totals().unmarked == 2);
  stand_in_refuse_records(false);
}

void more_streams_than_can_be_watched_are_told_of() {
  for (int n = 0; n < Watch::kStreams + 3; n++) CHECK(all_reduce(new_stream()) == kNcclSuccess);
  CHECK(facts().size() == Watch::kStreams && totals().streams_left_out == 3);
  EVENTUALLY(facts()[Watch::kStreams - 1].ended == 1);
}

void default_streams_have_one_name_each() {
  const Event event = new_event();
  stand_in_gate(nullptr, true);
  CHECK(all_reduce(nullptr) == kNcclSuccess);
  CHECK(all_reduce(per_thread_stream()) == kNcclSuccess);
  CHECK(facts().size() == 2);
  CHECK(cudaEventRecord(event, legacy_stream()) == kSuccess);
  CHECK(cudaStreamWaitEvent(new_stream(), event, 0) == kSuccess);
  CHECK(cudaEventRecord_ptsz(event, nullptr) == kSuccess);
  CHECK(cudaStreamWaitEvent(nullptr, event, 0) == kSuccess);
  CHECK(facts()[0].waits == 1 && facts()[1].waits == 1);
  stand_in_gate(nullptr, false);
  EVENTUALLY(facts()[0].ended == 1 && facts()[1].ended == 1);
}

}  // namespace

Cases cases_of_seeing() {
  return {
      CASE(counts_move),
      CASE(a_hung_collective_stands_still_on_its_stream_alone),
      CASE(a_compute_stream_that_waits_is_seen),
      CASE(destroyed_and_reused_events_mean_nothing_old),
      CASE(what_the_script_sees_by_cudaEventQuery_counts),
      CASE(a_capture_is_neither_recorded_into_nor_broken),
      CASE(a_thousand_collectives_in_flight_take_no_more_events_than_a_ring_has),
      CASE(eight_threads_at_once),
      CASE(a_forked_child_is_not_watched),
      CASE(a_group_counts_when_it_ends),
      CASE(a_call_in_progress_counts_behind_the_event_of_the_script),
      CASE(a_call_that_hangs_in_the_host_has_not_ended),
      CASE(calls_that_fail_leave_nothing_behind),
      CASE(more_streams_than_can_be_watched_are_told_of),
      CASE(default_streams_have_one_name_each),
  };
}

int main(int count, char** words) {
  Cases cases = cases_of_seeing();
  cases.merge(cases_of_saving());
  const auto found = count == 2 ? cases.find(words[1]) : cases.end();
  if (found == cases.end()) return 2;
  found->second();
  std::printf("%s: ok\n", words[1]);
  return 0;
}
