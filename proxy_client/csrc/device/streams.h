// The script's streams, as the log names them (log_format.h). Until one is made there is nothing to tell.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace understudy::client {

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device, bool high_priority);
// Whether one was made, by any thread.
bool streams_in_use() noexcept;

// Appends how far `stream` has come; answers the mark. 0 if there is nothing to tell.
uint64_t mark_stream(c10::Stream stream);
// The same of the end of what a communicator was given last.
uint64_t mark_work(c10::DeviceIndex device, uint64_t communicator);
// While it lives, events that this thread records are at that mark, and not at the end of a stream.
class RecordedAt {
 public:
  explicit RecordedAt(uint64_t mark);
  ~RecordedAt();
  RecordedAt(const RecordedAt&) = delete;
  RecordedAt& operator=(const RecordedAt&) = delete;
};
uint64_t recorded_at();  // 0: at the end of a stream
// What is appended to `stream` from here on waits for the mark, on the device.
void wait_in_stream(c10::Stream stream, uint64_t mark);
// The memory is used by what has been appended to `stream`: when it is freed, that comes first.
void use_in_stream(uint64_t handle, c10::Stream stream);
void use_in_stream(const c10::DataPtr& data, c10::Stream stream);

// As LogWriter::use_streams() asks for it.
uint64_t stream_of_this_thread();

}  // namespace understudy::client
