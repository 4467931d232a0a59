// The driver: what differs between devices. `cpu` runs PyTorch's CPU kernels, `cuda` the real GPU's.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proxy_server/csrc/driver/digest_staging.h"
#include "proxy_server/csrc/driver/driver_errors.h"
#include "proxy_server/csrc/driver/script_streams.h"

namespace understudy::server {

// A device keeps the memory it has once had, as the caching allocator of a GPU does. By default glibc gives
// the pages of every large buffer back when it is freed and takes them again for the next: 9,000 page faults,
// 15 ms, in a step of the example GPT. One heap for all threads, since those of other threads are of 64 MiB;
// a thread that has taken one keeps it.
void keep_freed_memory();
// Takes so much of the heap from the kernel, and frees it: of a process that was forked its first use costs
// more than a copy (0.5 ms a megabyte).
void touch_memory(uint64_t bytes);

class Driver {
 public:
  // `spec` is "cpu:0" or "cuda:1". Throws c10::Error for an unknown one.
  explicit Driver(const std::string& spec);

  c10::Device device() const { return device_; }
  c10::DispatchKey key() const { return device_.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA; }

  // Where a tensor over `storage` runs: few results of CUDA's operators lie in host memory, and stay there.
  static c10::DispatchKey key_of(const c10::Storage& storage) {
    return storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  }

  c10::Storage allocate(uint64_t bytes) const;
  void clear(const c10::Storage& storage) const;  // to zeroes
  c10::Storage allocate_cleared(uint64_t bytes) const;
  c10::Storage duplicate(const c10::Storage& from) const;  // on the same device
  c10::Storage host_copy(const c10::Storage& from) const;
  void to_host(const c10::Storage& from, uint64_t offset, uint64_t bytes, void* to) const;
  void from_host(const c10::Storage& to, uint64_t offset, uint64_t bytes, const void* from) const;
  // As from_host, without waiting for the device; `from` is read before it returns.
  void upload(const c10::Storage& to, uint64_t offset, uint64_t bytes, const void* from) const;
  // Digests of `digested`, in order, and copies of others; on a GPU all at once, by one wait for all that has
  // been queued there.
  std::vector<uint64_t> take(const std::vector<const c10::Storage*>& digested,
                             const std::vector<HostCopy>& copies = {}) const;
  // Whether that brings no content to the host.
  bool digests_in_place() const { return device_.is_cpu() || staging_->on_gpu(); }
  uint64_t digest(const c10::Storage& content) const { return take({&content}).front(); }
  at::Generator new_generator() const;
  // `from` is copied first. Throws c10::Error for what no generator could be in.
  void set_state(at::Generator& generator, const uint8_t* from, uint64_t bytes) const;
  at::Generator default_generator() const;
  void synchronize() const;
  // Nothing of this process can use the device any more.
  bool lost(const std::exception& error) const { return device_.is_cuda() && !sticky_error(error).empty(); }
  void give_back_freed_memory() const;  // to the operating system, which a device does only when asked
  // To be called by the thread that runs operators: makes the device its current one.
  void enter_thread() const;
  // What that thread does before it waits for a GPU, wherever it does so here; `over` says when there is
  // nothing to wait for any more.
  using BeforeWaiting = std::function<void(const std::function<bool()>& over)>;
  void before_waiting(BeforeWaiting act) { before_waiting_ = std::move(act); }
  // The same for whoever goes on to wait for the current stream without us, or for all of them.
  void announce_waiting(bool for_all = false) const;
  ScriptStreams& streams() const { return *streams_; }

 private:
  c10::Storage allocate_on(c10::Device device, uint64_t bytes) const;
  void copy_from_host(const c10::Storage& to, uint64_t offset, uint64_t bytes, const void* from,
                      bool asynchronous) const;
  c10::Device device_;
  BeforeWaiting before_waiting_;
  std::shared_ptr<DigestStaging> staging_ = std::make_shared<DigestStaging>();  // copies share it
  std::shared_ptr<ScriptStreams> streams_;                                      // and this
};

}  // namespace understudy::server
