#include "replay/csrc/life/process_end.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

namespace understudy::replay {
namespace {

constexpr uint64_t kExiting = 0x4;  // PF_EXITING of linux/sched.h, in field 9 of /proc/PID/stat

struct ThreadFacts {
  char state = 0;
  uint64_t flags = 0, threads = 0, start_ticks = 0, pending = 0;
  bool exits() const { return (flags & kExiting) != 0 || state == 'Z' || state == 'X'; }
  bool killed() const { return (pending >> (SIGKILL - 1) & 1) != 0; }
};

// Nothing where there is none any more; throws no errors: `unreadable` is set.
std::optional<ThreadFacts> read_stat(const std::string& path, bool& unreadable) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    unreadable = errno != ENOENT && errno != ESRCH;
    return std::nullopt;
  }
  char text[1024];
  const ssize_t bytes = read(file, text, sizeof text - 1);
  const int error = errno;
  close(file);
  if (bytes <= 0) {
    unreadable = bytes == 0 || error != ESRCH;
    return std::nullopt;
  }
  text[bytes] = 0;
  char* const name_end = std::strrchr(text, ')');  // the command may contain blanks and parentheses
  if (name_end == nullptr) {
    unreadable = true;
    return std::nullopt;
  }
  ThreadFacts facts;
  int field = 3;
  char* rest = nullptr;
  for (char* word = strtok_r(name_end + 1, " ", &rest); word != nullptr && field <= 31;
       word = strtok_r(nullptr, " ", &rest), field++) {
    if (field == 3) facts.state = word[0];
    if (field == 9) facts.flags = std::strtoull(word, nullptr, 10);
    if (field == 20) facts.threads = std::strtoull(word, nullptr, 10);
    if (field == 22) facts.start_ticks = std::strtoull(word, nullptr, 10);
    if (field == 31) facts.pending = std::strtoull(word, nullptr, 10);
  }
  unreadable = field <= 31;
  return unreadable ? std::nullopt : std::optional(facts);
}

}  // namespace

ProcessEnd process_end(int32_t pid, uint64_t start_ticks) {
  if (pid <= 0) return ProcessEnd::kRuns;
  const std::string process = "/proc/" + std::to_string(pid);
  bool unreadable = false;
  const auto leader = read_stat(process + "/stat", unreadable);
  if (unreadable) return ProcessEnd::kRuns;
  if (!leader || leader->start_ticks != start_ticks)
    return ProcessEnd::kStopped;  // its pid is free, or reused
  if (!leader->exits() && !leader->killed()) return ProcessEnd::kRuns;
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(opendir((process + "/task").c_str()), &closedir);
  if (tasks == nullptr) return errno == ENOENT ? ProcessEnd::kStopped : ProcessEnd::kDying;
  uint64_t listed = 0;
  while (const dirent* entry = readdir(tasks.get())) {
    if (entry->d_name[0] == '.') continue;
    listed++;
    const auto thread = read_stat(process + "/task/" + entry->d_name + "/stat", unreadable);
    if (unreadable || (thread && !thread->exits())) return ProcessEnd::kDying;
  }
  // The list ends early if a thread goes while it is made. None comes any more: if all that there were a
  // moment ago are on it, it is whole.
  return listed >= leader->threads ? ProcessEnd::kStopped : ProcessEnd::kDying;
}

}  // namespace understudy::replay
