// What the disk can do: the plainest loop of direct I/O, as `fio --ioengine=libaio --direct=1` would run it.
// It shares nothing with the engines, which are measured against it.
#pragma once
#include <string>

#include "recovery/snapshots/csrc/testing/parallel_io.h"

namespace understudy::persistence {

// Moves plan.bytes between `data` and the file's begin, in order; with one fdatasync after writes.  `data`,
// block and bytes are multiples of 4096.  Answers the seconds that took, without making and ending the
// kernel's contexts: ending one takes tens of milliseconds.  Throws StorageError.
double raw_loop(const std::string& path, bool write, uint8_t* data, const BlockPlan& plan);

}  // namespace understudy::persistence
