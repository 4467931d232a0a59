#include "replay/csrc/log/log_map.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "replay/csrc/log/futex.h"

namespace understudy::replay {
namespace {

constexpr uint64_t kSmallestFile = 4096;
constexpr uint64_t kMarksBytes = kMarkRows * kMoreMarks * sizeof(CommunicatorMark);

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw LogError(what + " " + path + ": " + std::strerror(errno));
}

struct File {
  int fd;
  ~File() { close(fd); }
};

void create_file(const std::string& path, uint64_t bytes) {
  File file{open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
  if (file.fd < 0) fail("cannot create", path);
  if (ftruncate(file.fd, static_cast<off_t>(bytes)) != 0) fail("cannot size", path);
}

// The beginning of a file that must not meet a full /dev/shm later; the rest is sparse.
void reserve_file(const std::string& path, uint64_t bytes) {
  File file{open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (file.fd < 0) fail("cannot open", path);
  if (const int error = posix_fallocate(file.fd, 0, static_cast<off_t>(bytes)); error != 0) {
    errno = error;
    fail("no shared memory for", path);
  }
}

uint64_t page_bytes() { return (sizeof(ControlPage) + 4095) / 4096 * 4096; }

// Nothing if there is none, as in logs of earlier versions: what they are is told by their control pages.
Mapping marks_in(const std::string& directory) {
  const std::string path = directory + "/marks";
  return access(path.c_str(), F_OK) == 0 ? Mapping(path, kMarksBytes) : Mapping();
}

}  // namespace

void create_log(const std::string& directory, uint32_t rank, uint32_t world, const LogSizes& sizes,
                int32_t proxyd_pid, uint64_t proxyd_start_ticks, uint32_t proxyd_grace_s) {
  if (sizes.segment_count == 0 || sizes.segment_count > kMaxSegments)
    throw LogError("a log has 1 to " + std::to_string(kMaxSegments) + " segments");
  if (sizes.segment_bytes < (4ull << 20) || sizes.segment_bytes % 4096 != 0)
    throw LogError("a segment has at least 4 MiB, a multiple of 4096 bytes");
  if (sizes.dictionary_bytes == 0 || sizes.dictionary_bytes % (kTemplateRegions * 4096) != 0)
    throw LogError("a dictionary has a multiple of " + std::to_string(kTemplateRegions * 4096) + " bytes");
  create_file(directory + "/control", page_bytes() + sizes.reply_bytes);
  reserve_file(directory + "/control", page_bytes() + std::min(sizes.reply_bytes, kReservedReplyBytes));
  create_file(directory + "/marks", kMarksBytes);
  create_file(directory + "/dictionary", sizes.dictionary_bytes);
  create_file(directory + "/segments", sizes.segment_bytes * sizes.segment_count);
  create_file(directory + "/shadow", sizes.shadow_bytes);
  create_file(directory + "/snapshot", std::max<uint64_t>(sizes.snapshot_bytes, kSmallestFile));
  Mapping control(directory + "/control", sizeof(ControlPage));
  auto* page = new (control.data()) ControlPage();
  page->fixed.version = kVersion;
  page->fixed.page_bytes = static_cast<uint32_t>(page_bytes());
  page->fixed.segment_bytes = sizes.segment_bytes;
  page->fixed.segment_count = sizes.segment_count;
  page->fixed.dictionary_bytes = sizes.dictionary_bytes;
  page->fixed.reply_bytes = sizes.reply_bytes;
  page->fixed.shadow_bytes = sizes.shadow_bytes;
  page->fixed.snapshot_bytes = sizes.snapshot_bytes;
  page->fixed.rank = rank;
  page->fixed.world = world;
  page->daemon.proxyd_pid = proxyd_pid;
  page->daemon.proxyd_start_ticks = proxyd_start_ticks;
  page->fixed.proxyd_grace_s = proxyd_grace_s;
  page->server.step = 1;
  page->server.progress_ns = now_ns();
  page->fixed.magic = kMagic;
}

namespace {

// Where a file is best mapped: so that its huge pages are the mapping's, too.  A hint; null: anywhere.
void* place_for(uint64_t bytes) {
  if (bytes < kHugePage) return nullptr;
  void* const room =
      mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  munmap(room, bytes + kHugePage);  // for a moment somebody else may take it: then it will be elsewhere
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room) + kHugePage - 1) / kHugePage * kHugePage);
}

}  // namespace

Mapping::Mapping(const std::string& path, uint64_t minimum_bytes, bool writable) {
  File file{open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW)};
  if (file.fd < 0) fail("cannot open", path);
  struct stat status{};
  if (fstat(file.fd, &status) != 0) fail("cannot inspect", path);
  if (status.st_uid != geteuid()) throw LogError(path + " belongs to another user");
  if (static_cast<uint64_t>(status.st_size) < minimum_bytes) throw LogError(path + " is too short");
  bytes_ = static_cast<uint64_t>(status.st_size);
  const int access = PROT_READ | (writable ? PROT_WRITE : 0);
  void* address = mmap(place_for(bytes_), bytes_, access, MAP_SHARED, file.fd, 0);
  if (address == MAP_FAILED) fail("cannot map", path);
  data_ = static_cast<uint8_t*>(address);
}

Mapping::~Mapping() {
  if (data_ != nullptr && ours_) munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      ours_(other.ours_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(ours_, other.ours_);
  return *this;
}

LogMap::LogMap(const std::string& directory)
    : LogMap(directory, Mapping(directory + "/control", sizeof(ControlPage)),
             Mapping(directory + "/dictionary", 8), Mapping(directory + "/segments", 4096),
             Mapping(directory + "/shadow", kSmallestFile), Mapping(directory + "/snapshot", kSmallestFile),
             marks_in(directory)) {
  if (marks() == nullptr) throw LogError(directory + " has no file of marks");
}

LogMap::LogMap(const std::string& directory, Mapping control, Mapping dictionary, Mapping segments,
               Mapping shadow, Mapping snapshot, Mapping marks)
    : control_(std::move(control)),
      dictionary_(std::move(dictionary)),
      segments_(std::move(segments)),
      shadow_(std::move(shadow)),
      snapshot_(std::move(snapshot)),
      marks_(std::move(marks)) {
  const FixedPart& p = page().fixed();
  if (p.magic != kMagic) throw LogError(directory + " holds no log of ours");
  if (p.version != kVersion)
    throw LogError(directory + " has log version " + std::to_string(p.version) +
                   ", this build reads version " + std::to_string(kVersion));
  page_bytes_ = p.page_bytes;
  reply_bytes_ = p.reply_bytes;
  segment_bytes_ = p.segment_bytes;
  segment_count_ = p.segment_count;
  snapshot_bytes_ = p.snapshot_bytes;
  region_bytes_ = p.dictionary_bytes / kTemplateRegions;
  const bool fits = page_bytes_ >= sizeof(ControlPage) && page_bytes_ <= control_.bytes() &&
                    reply_bytes_ <= control_.bytes() - page_bytes_ && reply_bytes_ >= 4096 &&
                    page_bytes_ % kAlign == 0 && segment_bytes_ % kAlign == 0 && segment_bytes_ >= 4096 &&
                    segment_bytes_ <= segments_.bytes() && segment_count_ >= 1 &&
                    snapshot_bytes_ <= snapshot_.bytes() && segment_count_ <= kMaxSegments &&
                    segment_count_ <= segments_.bytes() / segment_bytes_ && region_bytes_ != 0 &&
                    region_bytes_ % kAlign == 0 && dictionary_bytes() <= dictionary_.bytes();
  if (!fits) throw LogError(directory + ": sizes in the control page do not fit the files");
}

Record LogMap::record(uint64_t offset, uint64_t tail) const {
  if (offset % kAlign != 0 || offset >= tail) throw LogError("a record begins outside the log");
  const uint64_t room = segment_bytes_ - offset % segment_bytes_;
  if (room < sizeof(Record)) throw LogError("a record header straddles two segments");
  const Record r = copy_once(*reinterpret_cast<const Record*>(at(offset)));
  if (r.bytes < sizeof(Record) || r.bytes % kAlign != 0 || r.bytes > room || r.bytes > tail - offset)
    throw LogError("record " + std::to_string(r.index) + " has an impossible length of " +
                   std::to_string(r.bytes) + " bytes");
  if (r.kind >= kKinds)
    throw LogError("record " + std::to_string(r.index) + " is of unknown kind " + std::to_string(r.kind));
  if (sizeof(Record) + 8ull * r.frees > r.bytes)
    throw LogError("record " + std::to_string(r.index) + " frees more handles than it has room for");
  return r;
}

bool LogMap::reserve_reply(uint64_t bytes) {
  if (bytes <= std::min(reserved_reply_, reply_bytes())) return true;
  if (bytes > reply_bytes() || !reserve_memory(reply(), bytes)) return false;
  reserved_reply_ = bytes;
  return true;
}

bool LogMap::reserve_marks(uint64_t row, uint64_t count) {
  if (count <= reserved_marks_[row]) return true;
  if (marks() == nullptr) return false;
  uint8_t* const begin = marks_.data() + row * kMoreMarks * sizeof(CommunicatorMark);
  if (!reserve_memory(begin, count * sizeof(CommunicatorMark))) return false;
  reserved_marks_[row] = count;
  return true;
}

void LogMap::keep_out_of_forks() const {
  for (const Mapping* m : {&control_, &dictionary_, &segments_, &shadow_, &snapshot_, &marks_})
    madvise(m->data(), m->bytes(), MADV_DONTFORK);
}

namespace {

struct ProcessFacts {
  bool known = false;
  char state = 0;
  uint64_t start_ticks = 0;
};

ProcessFacts read_process(int32_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char text[1024] = {};
  const size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[n] = 0;
  const char* p = std::strrchr(text, ')');  // the command may contain blanks and parentheses
  if (p == nullptr) return {};
  char state = 0;
  unsigned long long ticks = 0;
  const int found =
      std::sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  &state, &ticks);
  return {found == 2, state, ticks};
}

}  // namespace

bool reserve_memory(uint8_t* begin, uint64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto first = reinterpret_cast<uintptr_t>(begin) / kPage * kPage;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes + kPage - 1) / kPage * kPage;
  if (madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_WRITE) == 0) return true;
  return errno == EINVAL;  // a kernel before 5.14: nothing can be said
}

uint64_t get_huge_pages(uint8_t* begin, uint64_t bytes) {
#ifdef MADV_COLLAPSE
  constexpr int kCollapse = MADV_COLLAPSE;
#else
  constexpr int kCollapse = 25;
#endif
  const auto end = reinterpret_cast<uintptr_t>(begin) + bytes;
  uint64_t got = 0;
  for (auto at = (reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage;
       at + kHugePage <= end; at += kHugePage) {
    auto* const page = reinterpret_cast<void*>(at);
    // Where there is nothing at all there is nothing to collapse.  Who populates finds out whether there is
    // memory; who writes is killed.
    if (madvise(page, 4096, MADV_POPULATE_WRITE) != 0 || madvise(page, kHugePage, kCollapse) != 0) break;
    got += kHugePage;
  }
  return got;
}

void give_memory_back(uint8_t* begin, uint64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) / kPage * kPage;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_REMOVE);
}

uint64_t process_start_ticks(int32_t pid) { return read_process(pid).start_ticks; }

void die_with_parent(int32_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before we asked
}

// A zombie is dead: its parent merely has not looked yet.
bool process_is_alive(int32_t pid, uint64_t start_ticks) {
  const ProcessFacts facts = read_process(pid);
  if (!facts.known || facts.state == 'Z' || facts.state == 'X') return false;
  return start_ticks == 0 || facts.start_ticks == start_ticks;
}

bool directory_is_locked(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return false;
  const bool locked = flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  close(file);
  return locked;
}

}  // namespace understudy::replay
