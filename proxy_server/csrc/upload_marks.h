// When the device is through with payloads that it copies straight from the log.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <map>

namespace understudy::server {

// A copy from pinned memory runs beside the executor, so a piece of the log may be used again only when the
// device has passed the commit that lets it go. On the `cpu` driver copies are over at once: nothing to do.
class UploadMarks {
 public:
  explicit UploadMarks(c10::Device device) : device_(device) {}
  // Everything queued so far belongs to commits up to `commit`.
  void mark(uint64_t commit);
  // Returns when the device has done everything that was queued before the mark of `commit`.
  void wait(uint64_t commit);
  void clear() { events_.clear(); }

 private:
  c10::Device device_;
  std::map<uint64_t, c10::Event> events_;
};

}  // namespace understudy::server
