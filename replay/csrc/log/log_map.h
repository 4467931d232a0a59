// The six files of a rank's log, mapped.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "replay/csrc/log/control_page.h"

namespace understudy::replay {

struct LogError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the worker may change at any moment is copied before it is looked at: what was checked is what is
// used.
template <class T>
T copy_once(const T& shared) {
  T copy;
  std::memcpy(&copy, &shared, sizeof copy);
  asm volatile("" ::: "memory");  // from here on `shared` may be another: the copy cannot be read from there
  return copy;
}

// A text of the control page, which need not end.
template <size_t Most>
std::string text_of(const char (&text)[Most]) {
  std::string copy(text, Most);
  copy.resize(strnlen(copy.data(), copy.size()));
  return copy;
}

struct LogSizes {
  uint64_t segment_bytes = 8ull << 20;
  uint64_t segment_count = 512;
  uint64_t dictionary_bytes = 256ull << 20;
  uint64_t reply_bytes = 4ull << 20;
  uint64_t shadow_bytes = 8ull << 30;
  uint64_t snapshot_bytes = 0;  // 0: no snapshots
};

// Of the reply area, from the beginning; a larger reply asks first.
inline constexpr uint64_t kReservedReplyBytes = 1 << 20;

// So much of a log without an optimizer step is reason for a commit, which lets what is older go.
inline uint64_t automatic_commit_bytes(const FixedPart& fixed) {
  return std::min<uint64_t>(64 << 20, fixed.segment_count * fixed.segment_bytes / 4);
}

// Makes the files (mode 0600) in an existing directory. Sparse: only touched pages cost memory.
void create_log(const std::string& directory, uint32_t rank, uint32_t world, const LogSizes& sizes,
                int32_t proxyd_pid, uint64_t proxyd_start_ticks, uint32_t proxyd_grace_s = 0);

// Memory of a log in which manifests and contents lie.
struct Area {
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  const char* name = "";
};

class Mapping {
 public:
  Mapping() = default;
  Mapping(const std::string& path, uint64_t minimum_bytes, bool writable = true);
  // Memory of somebody else, who keeps it as long as this lives.
  Mapping(uint8_t* memory, uint64_t bytes) : data_(memory), bytes_(bytes), ours_(false) {}
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  bool ours_ = true;
};

// Everything that reads sizes from the control page checks them against the files' real sizes first, so a
// corrupt page cannot lead outside the mappings.
class LogMap {
 public:
  explicit LogMap(const std::string& directory);
  // `name` is what errors call it.
  LogMap(const std::string& name, Mapping control, Mapping dictionary, Mapping segments, Mapping shadow,
         Mapping snapshot = {}, Mapping marks = {});
  // The control page: to read it, or as one of its writers.
  ReaderPage page() const { return ReaderPage(mapped_page()); }
  WorkerPage worker_page() const { return WorkerPage(mapped_page()); }
  ServerPage server_page() const { return ServerPage(mapped_page()); }
  DaemonPage daemon_page() const { return DaemonPage(mapped_page()); }
  MakerPage maker_page() const { return MakerPage(mapped_page()); }
  uint8_t* reply() const { return control_.data() + page_bytes_; }
  // Whether there is memory for a reply of so many bytes, header included; once there is, it stays.
  bool reserve_reply(uint64_t bytes);
  uint64_t reply_bytes() const { return reply_bytes_; }
  // Rows of further marks (marks.h), as words; nothing where the log has none.
  uint64_t* marks() const { return reinterpret_cast<uint64_t*>(marks_.data()); }
  // Whether a row has memory for so many; once it has, that stays.
  bool reserve_marks(uint64_t row, uint64_t count);
  uint64_t dictionary_bytes() const { return region_bytes_ * kTemplateRegions; }
  uint64_t region_bytes() const { return region_bytes_; }
  // Address of a template id.
  uint8_t* template_at(uint64_t id) const { return dictionary_.data() + id % dictionary_bytes(); }
  uint8_t* shadow() const { return shadow_.data(); }
  uint64_t shadow_bytes() const { return shadow_.bytes(); }
  Area shadows() const { return {shadow_.data(), shadow_.bytes(), "shadow area"}; }
  // Of no bytes where the log keeps no snapshots.
  Area snapshots() const { return {snapshot_.data(), snapshot_bytes_, "snapshot area"}; }
  uint8_t* segments() const { return segments_.data(); }
  uint64_t segment_bytes() const { return segment_bytes_; }
  uint64_t segment_count() const { return segment_count_; }
  // Address of a log offset; throws LogError if the directory of segments is corrupt.
  uint8_t* at(uint64_t offset) const {
    const uint64_t logical = offset / segment_bytes_;
    const uint32_t physical = copy_once(page().segments().of[logical % segment_count_]);
    if (physical >= segment_count_) throw LogError("the log names a segment that does not exist");
    return segments_.data() + physical * segment_bytes_ + offset % segment_bytes_;
  }
  // The header of a record after all checks: alignment, bounds, kind. Throws LogError.
  Record record(uint64_t offset, uint64_t tail) const;
  void keep_out_of_forks() const;

 private:
  ControlPage& mapped_page() const { return *reinterpret_cast<ControlPage*>(control_.data()); }

  Mapping control_, dictionary_, segments_, shadow_, snapshot_, marks_;
  std::array<uint64_t, kMarkRows> reserved_marks_{};
  uint64_t reserved_reply_ = kReservedReplyBytes;
  uint64_t page_bytes_ = 0, reply_bytes_ = 0, segment_bytes_ = 0, segment_count_ = 0;
  uint64_t snapshot_bytes_ = 0, region_bytes_ = 0;
};

// Backs pages of a mapping with memory now. False if there is none: touching them would have killed the
// process (SIGBUS), as in a container whose /dev/shm is small.
bool reserve_memory(uint8_t* begin, uint64_t bytes);
constexpr uint64_t kHugePage = 2 << 20;
// Backs the whole huge pages within a range with such, from its beginning on, as far as the kernel does that
// (Linux 6.1, whatever shmem_enabled says short of `deny`); answers how many bytes.  What is there stays.  A
// tenth of what it costs to back them page by page, and direct I/O from there is half as fast again.
uint64_t get_huge_pages(uint8_t* begin, uint64_t bytes);
// Gives memory of a mapped file back; it reads as zeros then.
void give_memory_back(uint8_t* begin, uint64_t bytes);

bool process_is_alive(int32_t pid, uint64_t start_ticks);
// Whether somebody holds this directory's lock, as every living proxyd does that of its runtime directory.
bool directory_is_locked(const std::string& path);
uint64_t process_start_ticks(int32_t pid);
// The kernel kills this process when `parent` dies; at once if it has.
void die_with_parent(int32_t parent);

}  // namespace understudy::replay
