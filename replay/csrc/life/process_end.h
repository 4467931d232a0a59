// How far the end of a process has come, which begins long before a pidfd tells of it: the kernel first has
// all threads stop, then gives memory, files and devices back, and then wakes whoever has a pidfd.
#pragma once
#include <cstdint>

namespace understudy::replay {

enum class ProcessEnd {
  kRuns,     // as far as can be told
  kDying,    // it has been killed, or is ending, but a thread of it may still run its program
  kStopped,  // no thread of it runs its program any more, and none ever will; its memory may still be there
};

// Asks /proc/PID, 20 us a thread. Who reads there holds the process's memory for that moment: if it was the
// last to do so, giving the memory back falls to the reader, and takes what it takes.
//
// Nothing but its own death makes a process look dead: PF_EXITING is never taken back, and
// SIGKILL waits for a thread only when all are to die. What cannot be read counts as running.
ProcessEnd process_end(int32_t pid, uint64_t start_ticks);

}  // namespace understudy::replay
