#include "recovery/snapshots/csrc/testing/raw_loop.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <vector>

#include "recovery/snapshots/csrc/storage/storage_file.h"

namespace understudy::persistence {
namespace {

class AioContext {
 public:
  explicit AioContext(uint32_t depth) {
    if (syscall(SYS_io_setup, depth, &id_) != 0)
      throw StorageError(errno, "no asynchronous I/O for the raw loop");
  }
  ~AioContext() { syscall(SYS_io_destroy, id_); }  // waits for what is under way
  AioContext(const AioContext&) = delete;
  AioContext& operator=(const AioContext&) = delete;

  void submit(iocb& block) {
    iocb* one = &block;
    if (syscall(SYS_io_submit, id_, 1, &one) != 1) throw StorageError(errno, "the raw loop cannot submit");
  }
  io_event wait() {
    io_event event{};
    while (syscall(SYS_io_getevents, id_, 1, 1, &event, nullptr) != 1)
      if (errno != EINTR) throw StorageError(errno, "the raw loop cannot wait");
    return event;
  }

 private:
  aio_context_t id_ = 0;
};

void one_thread(AioContext& context, int fd, bool write, uint8_t* data, const BlockPlan& plan, uint64_t first,
                uint64_t step) {
  std::vector<iocb> blocks(plan.depth);
  std::vector<uint64_t> free;
  for (uint64_t i = 0; i < plan.depth; i++) free.push_back(i);
  const auto end_one = [&] {
    const io_event event = context.wait();
    if (event.res != static_cast<int64_t>(blocks[event.data].aio_nbytes))
      throw StorageError(event.res < 0 ? static_cast<int>(-event.res) : EIO,
                         "the raw loop cannot move a block");
    free.push_back(event.data);
  };
  for (uint64_t at = first * plan.block; at < plan.bytes; at += step * plan.block) {
    if (free.empty()) end_one();
    const uint64_t slot = free.back();
    free.pop_back();
    iocb& block = blocks[slot] = {};
    block.aio_fildes = static_cast<uint32_t>(fd);
    block.aio_lio_opcode = write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_buf = reinterpret_cast<uintptr_t>(data + at);
    block.aio_nbytes = std::min(plan.block, plan.bytes - at);
    block.aio_offset = static_cast<int64_t>(at);
    block.aio_data = slot;
    context.submit(block);
  }
  while (free.size() < plan.depth) end_one();
}

}  // namespace

double raw_loop(const std::string& path, bool write, uint8_t* data, const BlockPlan& plan) {
  const Descriptor fd(open(path.c_str(), (write ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC));
  if (fd.get() < 0) throw StorageError(errno, "the raw loop cannot open " + path);
  std::vector<std::unique_ptr<AioContext>> contexts;
  for (uint32_t i = 0; i < plan.threads; i++) contexts.push_back(std::make_unique<AioContext>(plan.depth));
  const auto begin = std::chrono::steady_clock::now();
  in_threads(plan.threads, [&](uint64_t first, uint64_t step) {
    one_thread(*contexts[first], fd.get(), write, data, plan, first, step);
  });
  if (write && fdatasync(fd.get()) != 0) throw StorageError(errno, "the raw loop cannot flush " + path);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace understudy::persistence
