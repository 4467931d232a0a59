// Threads that use the snapshot store all at once, for ThreadSanitizer: the ring of free slots, the rule of
// commits, and a whole store on a disk in memory.  Arguments: seconds, seed.  Ends with a line of counts.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "recovery/snapshots/csrc/store/store.h"
#include "recovery/snapshots/csrc/testing/recorded_disk.h"

using namespace understudy;
using namespace understudy::persistence;

namespace {

void require(bool what, const char* sentence) {
  if (what) return;
  std::fprintf(stderr, "not so: %s\n", sentence);
  std::abort();
}

uint64_t stress_ring(uint64_t deadline) {
  constexpr uint32_t kNumbers = 3;
  IndexRing<RealPlatform> ring(kNumbers);
  std::atomic<uint32_t> holders[kNumbers]{};
  uint32_t plain[kNumbers]{};  // whoever holds a number may write here without any more ado
  std::atomic<uint64_t> turns{0};
  for (uint32_t i = 0; i < kNumbers; i++) ring.push(i);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; t++)
      threads.emplace_back([&] {
        while (replay::now_ns() < deadline) {
          uint32_t number = 0;
          if (!ring.pop(number)) continue;
          require(holders[number].fetch_add(1) == 0, "a number is with one thread at a time");
          plain[number]++;
          holders[number].fetch_sub(1);
          ring.push(number);
          turns++;
        }
      });
  }
  require(ring.size() == kNumbers, "no number is lost");
  return turns;
}

struct Counts {
  std::atomic<uint64_t> kept{0}, dropped{0}, failed{0}, read{0}, gone{0};
};

// A slot that stays taken would be one too few for the others.
void release_until_done(Store& store, uint64_t serial) {
  for (;;) {
    try {
      store.release_before(serial);
      return;
    } catch (const StorageError&) {
    }
  }
}

void persist_some(Store& store, RecordedDisk& disk, std::atomic<uint64_t>& serials, uint32_t seed,
                  uint64_t deadline, Counts& counts) {
  std::mt19937 random(seed);
  while (replay::now_ns() < deadline) {
    const uint64_t serial = ++serials;
    constexpr uint64_t kArea = 6 * kBlock;
    const AlignedMemory area = aligned_memory(kArea);  // of each by itself: nobody may change it meanwhile
    std::fill_n(area.get(), kArea, static_cast<uint8_t>(serial));
    const uint64_t bytes = random() % 20000, offset = random() % 8 * kExtentAlignment;
    const uint64_t digest = random() % 2 ? replay::content_digest(area.get() + offset, bytes) : 0;
    const bool loose = random() % 3 == 0;
    const Contents contents(loose ? std::vector<LooseContent>{{kDeviceBuffer, serial, area.get(), bytes}}
                                  : std::vector<LooseContent>{},
                            {area.get(), kArea, random() % 2 == 0, kBlock},
                            loose ? std::vector<AreaContent>{}
                                  : std::vector<AreaContent>{{kDeviceBuffer, serial, offset, bytes, digest}});
    if (random() % 16 == 0) disk.fail(disk.operations() + random() % 40, EIO, false);
    try {
      const Receipt receipt = store.persist({"job", 0, 1, serial, serial}, contents, 1 + random() % 3,
                                            replay::now_ns() + 20000000000ull);
      (receipt.registered ? counts.kept : counts.dropped)++;
      release_until_done(store, serial);
    } catch (const StorageError&) {
      counts.failed++;
    } catch (const StoreError&) {
      counts.failed++;  // below the floor by now
    }
  }
}

void read_some(Store& store, uint64_t deadline, Counts& counts) {
  while (replay::now_ns() < deadline) {
    try {
      for (const Entry& entry : store.snapshots()) {
        const std::vector<Extent> extents = store.extents(entry.registered.sequence);
        std::vector<uint8_t> content(extents.at(0).bytes);
        store.read(entry.registered.sequence, 0, content.data(), content.size());
        for (const uint8_t byte : content)
          require(byte == static_cast<uint8_t>(extents[0].id), "no reader gets wrong bytes");
        counts.read++;
      }
    } catch (const StoreError&) {
      counts.gone++;
    } catch (const StorageError&) {
      counts.gone++;
    }
  }
}

void stress_store(uint32_t slots, uint64_t deadline, uint32_t seed, Counts& counts) {
  const Geometry geometry{slots, 8 * kBlock, 2 * kBlock};
  const auto disk = std::make_shared<RecordedDisk>(std::vector<uint8_t>(geometry.store_bytes()), false);
  disk->keep_log(false);
  {
    RecordedStorage storage(disk, 1);
    Store::format(storage, geometry);
  }
  StoreOptions options;
  options.pool_bytes = 6 * geometry.chunk_bytes;
  Store store(std::make_unique<RecordedStorage>(disk, 3), options);
  std::atomic<uint64_t> serials{0};
  {
    std::vector<std::jthread> threads;
    for (uint32_t t = 0; t < 3; t++)
      threads.emplace_back([&, t] { persist_some(store, *disk, serials, seed + t, deadline, counts); });
    threads.emplace_back([&] { read_some(store, deadline, counts); });
  }
  disk->fail(UINT64_MAX, 0, false);
  const Registry last = store.registry();
  uint32_t registered = 0;
  for (const Registered& r : last.slots) registered += r.sequence != 0;
  for (const Entry& entry : store.snapshots())
    require(store.verify(entry.registered.sequence).empty(), "what is registered is whole");
  const Contents nothing({}, {}, {});
  store.persist({"job", 0, 1, 0, ++serials}, nothing, 1, 0);  // settles what was in doubt
  store.release_before(serials);
  require(store.free_slots() == geometry.slots - 1 && registered != 0, "no slot is lost");
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 3;
  const auto seed = static_cast<uint32_t>(count > 2 ? std::atoi(arguments[2]) : 1);
  const auto part = static_cast<uint64_t>(seconds / 3 * 1e9);
  const uint64_t turns = stress_ring(replay::now_ns() + part);
  Counts counts;
  stress_store(4, replay::now_ns() + part, seed, counts);
  stress_store(8, replay::now_ns() + part, seed, counts);
  std::printf(
      "%llu turns of the ring, %llu snapshots kept, %llu dropped, %llu failed, %llu read, %llu gone\n",
      static_cast<unsigned long long>(turns), static_cast<unsigned long long>(counts.kept),
      static_cast<unsigned long long>(counts.dropped), static_cast<unsigned long long>(counts.failed),
      static_cast<unsigned long long>(counts.read), static_cast<unsigned long long>(counts.gone));
}
