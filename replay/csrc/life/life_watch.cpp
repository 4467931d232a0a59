#include "replay/csrc/life/life_watch.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "replay/csrc/life/life_word.h"
#include "replay/csrc/life/process_end.h"
#include "replay/csrc/log/futex.h"
#include "replay/csrc/log/log_map.h"

namespace understudy::replay {
namespace {

// Of linux/futex.h since 5.16, which the headers that we are built with may not have.
#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
struct Waited {
  uint64_t value, address;
  uint32_t flags, reserved;
};
constexpr uint32_t kWord32 = 2;  // FUTEX_32
constexpr size_t kMostWaited = 128;
constexpr size_t kWordsEach = kMostWaited - 1;

// A process is looked at again while its last threads end, first soon and then at leisure.
constexpr uint64_t kFirstPauseNs = 50000, kLongestPauseNs = 5000000;
// So many looks, a tenth of a second, at a process that lives although its word tells of its death.
constexpr uint32_t kLooks = 25;
// A word is taken, and let go or left by a death: who changes it more often is not a device server.
constexpr uint32_t kMostChanges = 16;

long wait_for_any(std::array<Waited, kMostWaited>& words, size_t count, const timespec* until) {
  return syscall(SYS_futex_waitv, words.data(), count, 0, until, CLOCK_MONOTONIC);
}

timespec as_timespec(uint64_t ns) {
  return {static_cast<time_t>(ns / 1000000000ull), static_cast<long>(ns % 1000000000ull)};
}

}  // namespace

struct LifeWatch::Word {
  Word(const std::string& directory, uint64_t id_, int32_t pid_, uint64_t start_ticks_)
      : id(id_),
        control(directory + "/control", sizeof(ControlPage)),
        pid(pid_),
        start_ticks(start_ticks_),
        seen(now()) {
    const auto& page = *reinterpret_cast<const ControlPage*>(control.data());
    if (page.fixed.magic != kMagic || page.fixed.version != kVersion)
      throw LogError(directory + " holds no log of this build");
  }
  const std::atomic<uint32_t>& word() const {
    return reinterpret_cast<const ControlPage*>(control.data())->shared.server_life;
  }
  uint32_t now() const { return word().load(std::memory_order_acquire); }

  const uint64_t id;
  const Mapping control;  // our own: the session's may go first
  const int32_t pid;
  const uint64_t start_ticks;
  std::atomic<bool> forgotten{false};
  // Of the waiter.
  uint32_t seen, changes = 0, looks = 0;
  uint64_t next_look_ns = 0, pause_ns = 0;
};

// One thread and what it waits for.
class LifeWatch::Waiter {
 public:
  explicit Waiter(LifeWatch& watch) : watch_(watch) {
    sigset_t all, before;  // signals are for others
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Waiter() {
    stop_.store(true);
    look();
    thread_.join();
  }
  // False: there is no room, or it has ended.
  bool add(const std::shared_ptr<Word>& word) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_ || words_.size() >= kWordsEach) return false;
    words_.push_back(word);
    look();
    return true;
  }
  void forget(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& word : words_)
      if (word->id == id) word->forgotten.store(true);
    drop_forgotten();
    look();
  }

 private:
  void look() {
    changed_.fetch_add(1);
    futex_wake(changed_);
  }
  void drop_forgotten() {
    std::erase_if(words_, [](const auto& word) { return word->forgotten.load(); });
  }
  std::vector<std::shared_ptr<Word>> present() {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_forgotten();
    return words_;
  }
  void finish(Word& word, LifeNews news) {
    if (!word.forgotten.exchange(true)) watch_.tell(word, news);
  }

  // When it is to be looked at again; 0: not before it changes.
  uint64_t examine(Word& word) {
    const uint32_t value = word.now();
    if (value != word.seen) {
      word.seen = value;
      if (++word.changes > kMostChanges) return finish(word, LifeNews::kDisbelieved), 0;
      word.looks = owner_died(value) ? kLooks : 0;
      word.next_look_ns = 0;
      word.pause_ns = kFirstPauseNs;
    }
    if (word.looks == 0) return 0;
    if (now_ns() < word.next_look_ns) return word.next_look_ns;
    switch (process_end(word.pid, word.start_ticks)) {
      case ProcessEnd::kStopped:
        return finish(word, LifeNews::kDied), 0;
      case ProcessEnd::kDying:  // it will get there, or a pidfd tells first
        break;
      case ProcessEnd::kRuns:
        if (--word.looks == 0) return watch_.tell(word, LifeNews::kDisbelieved), 0;
    }
    word.next_look_ns = now_ns() + word.pause_ns;
    word.pause_ns =
        std::min(word.pause_ns + word.pause_ns / 4, kLongestPauseNs);  // late by a quarter at most
    return word.next_look_ns;
  }

  void run() {
    pthread_setname_np(pthread_self(), "life-watch");
    std::array<Waited, kMostWaited> waited;
    while (!stop_.load()) {
      waited[0] = {changed_.load(), reinterpret_cast<uint64_t>(&changed_), kWord32, 0};
      const auto words = present();
      size_t count = 1;
      uint64_t next = 0;
      for (const auto& word : words) {
        const uint64_t again = examine(*word);
        if (again != 0) next = next == 0 ? again : std::min(next, again);
        if (!word->forgotten.load())
          waited[count++] = {word->seen, reinterpret_cast<uint64_t>(&word->word()), kWord32, 0};
      }
      const timespec until = as_timespec(next);
      if (stop_.load()) return;
      if (wait_for_any(waited, count, next == 0 ? nullptr : &until) >= 0) continue;
      if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) continue;
      return give_up();
    }
  }

  void give_up() {
    std::vector<std::shared_ptr<Word>> words;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      words.swap(words_);
    }
    for (const auto& word : words) finish(*word, LifeNews::kUnwatched);
  }

  LifeWatch& watch_;
  std::atomic<uint32_t> changed_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  bool ended_ = false;
  std::vector<std::shared_ptr<Word>> words_;
  std::thread thread_;
};

LifeWatch::LifeWatch() {
  std::array<Waited, kMostWaited> none;
  // A kernel that has it refuses to wait for nothing.
  if (wait_for_any(none, 0, nullptr) != -1 || errno != EINVAL)
    throw LogError(std::string("the kernel does not wait for several words at once (futex_waitv: ") +
                   std::strerror(errno) + ")");
  descriptor_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (descriptor_ < 0) throw LogError(std::string("no eventfd: ") + std::strerror(errno));
}

LifeWatch::~LifeWatch() {
  waiters_.clear();  // nobody tells any more
  close(descriptor_);
}

uint64_t LifeWatch::watch(const std::string& directory, int32_t pid, uint64_t start_ticks) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto word = std::make_shared<Word>(directory, ++last_id_, pid, start_ticks);
  for (const auto& waiter : waiters_)
    if (waiter->add(word)) return word->id;
  waiters_.push_back(std::make_unique<Waiter>(*this));
  waiters_.back()->add(word);
  return word->id;
}

void LifeWatch::forget(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& waiter : waiters_) waiter->forget(id);
}

std::vector<LifeNotice> LifeWatch::take() {
  uint64_t count;
  [[maybe_unused]] const ssize_t bytes = read(descriptor_, &count, sizeof count);
  std::lock_guard<std::mutex> lock(told_mutex_);
  return std::exchange(notices_, {});
}

void LifeWatch::tell(const Word& word, LifeNews news) {
  {
    std::lock_guard<std::mutex> lock(told_mutex_);
    notices_.push_back({word.id, news, now_ns()});
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = write(descriptor_, &one, sizeof one);
}

}  // namespace understudy::replay
