// Everything a device server holds for its rank, and how it is committed, rewound and rebuilt.
#pragma once
#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proxy_server/csrc/collectives/collectives.h"
#include "proxy_server/csrc/driver/driver.h"
#include "proxy_server/csrc/settings.h"
#include "proxy_server/csrc/snapshots/shadow_area.h"
#include "proxy_server/csrc/snapshots/snapshots.h"
#include "proxy_server/csrc/state/generator_position.h"
#include "proxy_server/csrc/state/storage_store.h"
#include "replay/csrc/log/log_map.h"
#include "replay/csrc/rewind/rewind.h"

namespace understudy::server {

using BufferTable = replay::BufferTable<Content, StorageStore>;

struct Policy {
  bool protect = false;              // keep pre-images, digests and shadows
  bool optimizer_preimages = false;  // in the OPTIMIZER phase too, as long as they fit
};

// Where execution stands between two records.
struct Position {
  uint64_t offset = 0, index = 0;
  bool frees_done = false;  // of the record at `offset`
  uint64_t steps = 0;       // optimizer steps completed
  uint64_t call = 0;        // records of this minibatch begun
};

class DeviceState {
 public:
  // `threads`: see Settings.
  DeviceState(const Driver& driver, replay::LogMap& log, Policy policy, Communicators& communicators,
              int threads);

  BufferTable& table() { return table_; }
  const Policy& policy() const { return policy_; }
  // Whether no way leads out of an optimizer step, as no pre-images are kept in it.
  bool steps_are_final() const { return policy_.protect && !step_preimages_; }
  // Reads the arguments of a call, of which those that it writes are copied at once.
  template <class Read>
  void copy_together(Read&& read) {
    store_.gather_copies();
    try {
      read();
    } catch (...) {
      store_.finish_copies();
      throw;
    }
    store_.finish_copies();
  }
  // For the program, which has found no memory: lets go of memory for pre-images to come, or else of what is
  // kept for going back. False if there is nothing.
  bool make_room();
  c10::Storage allocate_cleared(uint64_t bytes) {
    for (;;) {
      try {
        return driver_.allocate_cleared(bytes);
      } catch (const c10::Error& e) {
        if (!out_of_memory(e) || !make_room()) throw;
      }
    }
  }
  // Storages of former pre-images, kept because a fresh page costs more than a copy.
  uint64_t spare_storage_bytes() const { return store_.pooled_bytes(); }
  void drop_spare_storages() { store_.clear(); }

  // The content of a buffer, for reading or (before the change) for writing; waits for collectives on it.
  Content& read(uint64_t handle) {
    BufferTable::Buffer& b = table_.read(handle);
    if (__builtin_expect(b.in_flight, 0)) communicators_.wait_for(handle, table_);
    return b.content;
  }
  Content& write(uint64_t handle) {
    BufferTable::Buffer& b = table_.read(handle);
    if (__builtin_expect(b.in_flight, 0)) communicators_.wait_for(handle, table_);
    table_.begin_write(handle, b);
    if (__builtin_expect(driver_.streams().several(), 0)) driver_.streams().stay_behind_copies();
    return b.content;
  }
  Content& create(uint64_t handle, c10::Storage storage) {
    return table_.create(handle, std::move(storage)).content;
  }
  // A buffer of which only name and size are known.
  void create_without_content(uint64_t handle, uint64_t bytes);

  at::Generator& generator(uint64_t id);
  void forget_generator(uint64_t id) { generators_.erase(id); }
  // As CUDA shows it: 16 bytes.
  std::vector<uint8_t> generator_state(uint64_t id);
  void set_generator_state(uint64_t id, const uint8_t* state, uint64_t bytes);
  Settings& settings() { return settings_; }
  // Goes on with records, on the stream on which they lie; and stands still again.
  void begin_running();
  void end_running() noexcept;
  // A record of a stream: see log_format.h.
  void run_stream_record(replay::Kind kind, uint64_t aux, Words words);
  void phase(replay::Phase phase);

  // Makes a commit at `position` and publishes it. Returns its number. `optimizer`: a step without pre-images
  // begins right behind it; who does not live to finish it is rolled forward from there. `for_snapshot`: a
  // snapshot that is ordered may be one of this commit.
  // `step_digest`: of the optimizer step before it, see step_digest.h.
  uint64_t commit(const Position& position, bool optimizer = false, bool for_snapshot = true,
                  uint64_t step_digest = 0);
  // Whether the newest commit is of that kind, and lies at this record.
  bool committed_for_optimizer(uint64_t record_index) const;
  // Copies a portion of a snapshot, if one is being taken; whether there is more to do.
  bool advance_snapshot(uint64_t bytes) { return snapshots_.under_way() && snapshots_.advance(bytes); }
  // Whether the commit behind so many steps is to be one of a snapshot.
  bool snapshot_is_due(uint64_t steps) const { return snapshots_.ordered(steps) != 0; }
  // For a rank alone that is to come back here: begins a snapshot of the newest commit, if there is none.
  // False if it takes none.
  bool snapshot_here();
  void finish_snapshot() { snapshots_.finish(); }
  // For a rank alone whose log is full: a snapshot of the commit that has just been made, at once. False if
  // it takes none.
  bool snapshot_now();
  // Lets go of what no commit at or above the floor needs; true if log segments became free.
  bool apply_floor();
  // The log must shrink whatever it costs: only the newest commit stays.
  void cut_log();

  // In place, back to a commit. Returns where to go on, and the bytes brought back. Throws if a buffer's
  // content is not the commit's.
  std::pair<Position, uint64_t> rewind(uint64_t target);
  // A fresh server: the state of commit `target` but for the content replicas hold (see adopt_replica).
  std::pair<Position, uint64_t> restore(uint64_t target);
  // Fresh or not: all of the state of commit `target`, from its snapshot.
  std::pair<Position, uint64_t> restore_snapshot(uint64_t target);
  // Content of a replica for a restored buffer; complete() checks digests and throws if one differs.
  void adopt_replica(uint64_t handle, uint64_t offset, const void* data, uint64_t bytes);
  // The same for whole buffers of replicas on this host, (handle, address there), from the memory of the
  // process that holds them. False, and nothing is changed, if the kernel does not permit that.
  bool read_from_process(int pid, const std::vector<std::pair<uint64_t, uint64_t>>& places);
  void mark_lost(uint64_t handle);
  void complete_restore(const std::vector<std::pair<uint64_t, uint64_t>>& digests);
  void read_state(uint64_t handle, uint64_t offset, uint64_t bytes, void* to);
  bool has_content(uint64_t handle);
  struct Place {
    uint64_t handle, address, bytes;
  };
  // Where content lies in host memory; nothing on a GPU.
  std::optional<std::vector<Place>> locate();
  // (handle, XXH3-64) of all content, by handle; generators likewise. Waits for collectives in flight;
  // throws CollectiveError if they were aborted.
  std::vector<std::pair<uint64_t, uint64_t>> content_digests();
  std::vector<std::pair<uint64_t, uint64_t>> generator_digests() const;
  uint64_t digest(const Content& content) const { return driver_.digest(content); }
  void set_replicated(const std::vector<uint64_t>& handles);
  void publish_statistics();
  // Changes one bit of the oldest buffer that was alive at the last commit, unnoticed by any bookkeeping.
  // Returns its handle, 0 if there is none.
  uint64_t flip_bit();

 private:
  void pass_the_device(bool waited = false);
  void share_contents(c10::Stream stream);
  void keep_step_preimages(bool keep);
  replay::CommitEntry entry(uint64_t number) const;
  c10::Storage without_content(uint64_t bytes) const;
  replay::CommitRow newest_commit() const;
  Position position_of(const replay::CommitEntry& entry) const;
  replay::Manifest manifest_of(uint64_t number, const uint8_t*& base) const;
  // The state of all generators, as part of a commit; false if the shadow area has no room for it.
  bool shadow_generators(uint64_t commit, replay::Manifest& manifest);
  void begin_snapshot(uint64_t serial, replay::CommitRow row);
  void load_generators(const replay::Manifest& manifest, const uint8_t* base);
  void adopt_buffer(const replay::ManifestBuffer& row, const uint8_t* base);
  void check_content(const replay::Manifest& manifest);
  std::optional<replay::Manifest> describe(uint64_t number, bool optimizer, bool& complete);
  void tell_incomplete(bool named, size_t communicators);
  static std::vector<const c10::Storage*> contents_of(const std::vector<BufferTable::Buffer*>& buffers);
  static void know_digests(const std::vector<BufferTable::Buffer*>& buffers,
                           const std::vector<uint64_t>& digests);
  void start_of_session();
  void begin_forward(replay::ServerPage page);
  uint64_t floor() const;
  replay::ServerPage page() const { return log_.server_page(); }

  const Driver& driver_;
  replay::LogMap& log_;
  Policy policy_;
  Communicators& communicators_;
  StorageStore store_;
  BufferTable table_;
  ShadowArea shadows_;
  Snapshots snapshots_;
  std::map<uint64_t, at::Generator> generators_;
  GeneratorPositions positions_;
  Settings settings_;
  uint64_t applied_floor_ = 0, floor_offset_ = 0;
  bool incomplete_told_ = false;
  bool step_preimages_ = false;  // pre-images in the OPTIMIZER phase
  bool watches_step_ = false;    // amid one that began with a way back: if it ends without, memory was short
  bool room_made_ = false;       // said already
};

}  // namespace understudy::server
