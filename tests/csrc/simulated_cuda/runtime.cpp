#include "tests/csrc/simulated_cuda/runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "tests/csrc/simulated_cuda/failures.h"
#include "tests/csrc/simulated_cuda/settings.h"

namespace understudy::simulated {
namespace {

constexpr int kMostDevices = 8;

thread_local int device_of_thread = 0;
thread_local std::array<int64_t, kMostDevices> streams_of_thread{};

c10::Device device_at(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// ---------------------------------------------------------------- memory of the device
// Memory belongs to the stream on which it was taken: what is enqueued there after it was given back comes
// after the last use. Of other streams the allocator knows only what it is told (recordStream).
struct Block {
  void* address;
  size_t bytes;
  int device;
  int64_t stream;
  std::set<int64_t> others;
};

// As PyTorch's allocator keeps it: its own stream may have it again at once, whoever still reads it
// elsewhere; others only when all of them are through.
struct Kept {
  std::unique_ptr<Block> block;
  std::vector<Event> readers;
};
std::mutex kept_mutex;
std::vector<Kept>& kept() {
  static auto* const blocks = new std::vector<Kept>;
  return *blocks;
}

void wait_in_stream(Stream& waits, Event event) {
  if (event.stream == &waits) return;
  waits.enqueue([event] { event.stream->wait(event.number); });
}

void give_back(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  Stream& own = stream(block->device, block->stream);
  for (const int64_t id : block->others) {
    Stream& other = stream(block->device, id);
    wait_in_stream(own, {&other, other.newest()});
  }
  std::vector<Event> readers;
  for (int64_t id = 0; id <= kPoolStreams; id++) {
    Stream& other = stream(block->device, id);
    const uint64_t newest = other.newest();
    if (&other != &own && !other.passed(newest)) readers.push_back({&other, newest});
  }
  if (readers.empty())
    return void(own.enqueue([at = block->address, device = block->device] { memory(device).give_back(at); }));
  readers.push_back({&own, own.newest()});
  const std::lock_guard<std::mutex> lock(kept_mutex);
  kept().push_back({std::move(block), std::move(readers)});
}

void let_kept_go() {
  const std::lock_guard<std::mutex> lock(kept_mutex);
  std::erase_if(kept(), [](const Kept& one) {
    for (const Event& reader : one.readers)
      if (!reader.stream->passed(reader.number)) return false;
    memory(one.block->device).give_back(one.block->address);
    return true;
  });
}

// Poison, as its stream comes to it.
std::unique_ptr<Block> take_kept(int device, int64_t id, size_t bytes) {
  const std::lock_guard<std::mutex> lock(kept_mutex);
  for (auto one = kept().begin(); one != kept().end(); ++one) {
    const Block& block = *one->block;
    if (block.device != device || block.stream != id || block.bytes != bytes) continue;
    std::unique_ptr<Block> taken = std::move(one->block);
    kept().erase(one);
    taken->others.clear();
    stream(device, id).enqueue([device, at = taken->address, bytes] { memory(device).poison(at, bytes); });
    return taken;
  }
  return nullptr;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, device_at(device)};
    check(Place::kAllocate);
    if (auto again = take_kept(device, current_stream_id(device), bytes)) {
      void* const address = again->address;
      return {address, again.release(), &give_back, device_at(device)};
    }
    let_kept_go();
    void* address = memory(device).take(bytes);
    if (address == nullptr) {  // what has been given back comes with the streams
      synchronize_device(device);
      let_kept_go();
      address = memory(device).take(bytes);
    }
    const Memory::Counts counts = memory(device).counts();
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "CUDA out of memory. Tried to allocate ", bytes,
                     " bytes. GPU ", device, " has a total capacity of ", memory(device).bytes(),
                     " bytes of which ", memory(device).bytes() - counts.bytes, " bytes is free.");
    auto* const block = new Block{address, bytes, device, current_stream_id(device), {}};
    return {address, block, &give_back, device_at(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_INTERNAL_ASSERT(false); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &give_back) return;
    auto* const block = static_cast<Block*>(data.get_context());
    if (block->stream != stream.id()) block->others.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Memory::Counts counts = memory(device).counts();
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto put = [](c10::CachingAllocator::StatArray& array, uint64_t now, uint64_t most,
                        uint64_t taken) {
      auto& all = array[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = static_cast<int64_t>(now), all.peak = static_cast<int64_t>(most);
      all.allocated = static_cast<int64_t>(taken), all.freed = static_cast<int64_t>(taken - now);
    };
    put(stats.allocation, counts.blocks, counts.most_blocks, counts.taken_blocks);
    put(stats.allocated_bytes, counts.bytes, counts.most_bytes, counts.taken_bytes);
    put(stats.reserved_bytes, counts.bytes, counts.most_bytes, counts.taken_bytes);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { memory(device).forget_taken(); }
  void resetPeakStats(c10::DeviceIndex device) override { memory(device).forget_most(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {memory(device).bytes() - memory(device).counts().bytes, memory(device).bytes()};
  }
};

// ---------------------------------------------------------------- pinned memory of the host
std::mutex pinned_mutex;
std::map<const uint8_t*, size_t>& pinned() {
  static auto* const ranges = new std::map<const uint8_t*, size_t>;
  return *ranges;
}

void give_pinned_back(void* address) {
  {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned().erase(static_cast<const uint8_t*>(address));
  }
  std::free(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned()[static_cast<const uint8_t*>(address)] = bytes;
    return {address, address, &give_pinned_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_pinned_back; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_INTERNAL_ASSERT(false); }
};

// ---------------------------------------------------------------- streams and events
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream_id(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    static std::atomic<int64_t> next{0};
    if (high_priority) return c10::Stream(c10::Stream::UNSAFE, device, own_stream_id());
    return c10::Stream(c10::Stream::UNSAFE, device, 1 + next++ % kPoolStreams);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams_of_thread.at(static_cast<size_t>(stream.device_index())) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream of) const override {
    return &stream(of.device_index(), of.id());
  }
  bool queryStream(const c10::Stream& of) const override {
    check(Place::kSynchronize);
    Stream& one = stream(of.device_index(), of.id());
    return one.passed(one.newest());
  }
  void synchronizeStream(const c10::Stream& of) const override {
    Stream& one = stream(of.device_index(), of.id());
    synchronize(one, one.newest());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    counters().synchronizations++;
    synchronize_device(device);
    check(Place::kSynchronize);
  }
  void record(void** event, const c10::Stream& of, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    Stream& one = stream(of.device_index(), of.id());
    *static_cast<Event*>(*event) = {&one, one.newest()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& of) const override {
    if (event != nullptr) wait_in_stream(stream(of.device_index(), of.id()), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    check(Place::kSynchronize);
    const Event at = *static_cast<Event*>(event);
    return at.stream->passed(at.number);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event at = *static_cast<Event*>(event);
    synchronize(*at.stream, at.number);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Registration {
  Registration() { c10::SetAllocator(c10::kCUDA, allocator(), /*priority=*/1); }
} registration;

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* const only = new Allocator;
  return only;
}

Memory& memory(int device) {
  static auto* const all = [] {
    auto* const made = new std::vector<std::unique_ptr<Memory>>;
    for (int i = 0; i < settings().devices; i++)
      made->push_back(std::make_unique<Memory>(settings().device_bytes));
    return made;
  }();
  return *all->at(static_cast<size_t>(device));
}

int current_device() { return device_of_thread; }
int64_t current_stream_id(int device) { return streams_of_thread.at(static_cast<size_t>(device)); }
Stream& current_stream() { return stream(current_device(), current_stream_id(current_device())); }

int64_t own_stream_id() {
  static std::atomic<int64_t> next{0};
  return 1 + kPoolStreams + next++ % (kStreams - 1 - kPoolStreams);
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto* const at = static_cast<const uint8_t*>(address);
  auto behind = pinned().upper_bound(at);
  return behind != pinned().begin() && (--behind, at < behind->first + behind->second);
}

void synchronize(Stream& stream, uint64_t number) {
  counters().synchronizations++;
  stream.wait(number);
  check(Place::kSynchronize);
}

// Where others can read them, also once this process has been killed.
Counters& counters() {
  static Counters& only = []() -> Counters& {
    if (settings().counters == nullptr) return *new Counters;
    const std::string path = std::string(settings().counters) + "/" + std::to_string(getpid());
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Counters)) == 0, "cannot make ", path);
    void* const place = mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(place != MAP_FAILED, "cannot map ", path);
    return *new (place) Counters;
  }();
  return only;
}

}  // namespace understudy::simulated

namespace at {
namespace {

namespace simulated = understudy::simulated;

struct SimulatedHooks final : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::settings().devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return simulated::settings().devices; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(getNumGPUs()); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(simulated::current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override { exchangeDevice(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return c10::impl::getDeviceGuardImpl(kCUDA)->exchangeDevice({kCUDA, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override {
    c10::impl::getDeviceGuardImpl(kCUDA)->synchronizeDevice(device);
  }
  // The kernels are the CPU's, and so is their generator: a Mersenne Twister, one for all devices of a
  // process. Its state is read and written on the host, as that of Philox is.
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void* data) const override {
    for (int i = 0; i < simulated::settings().devices; i++)
      if (simulated::memory(i).holds(data)) return {kCUDA, static_cast<DeviceIndex>(i)};
    return {kCPU};
  }
  bool isPinnedPtr(const void* data) const override { return simulated::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static simulated::PinnedAllocator only;
    return &only;
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return simulated::allocator(); }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks)

}  // namespace
}  // namespace at
