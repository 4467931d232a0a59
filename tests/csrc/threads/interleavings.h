// Runs a few threads of code in every order that their atomic steps can take.
//
// The code is compiled against ModelPlatform: each atomic operation, lock and wait gives the turn back before
// it happens, and a scheduler says who is next.  Orders that lead to the same state are tried once: a
// thread's local state follows from what it has observed, so that a state is all values of atomics and what
// everybody has seen.
#pragma once
#include <cxxabi.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace model {

constexpr uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
  return hash ^ (hash >> 29);
}

// One run of some threads in one order.
class Run {
 public:
  static Run*& current() {
    static Run* run = nullptr;
    return run;
  }

  Run() = default;
  Run(const Run&) = delete;
  // Threads that have not ended are forgotten, with what they hold.
  ~Run() {
    for (auto& fiber : fibers_) spare_stacks().push_back(std::move(fiber->stack));
  }

  void add(std::function<void()> body) {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers_.back();
    fiber.body = std::move(body);
    if (spare_stacks().empty()) {
      fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    } else {
      fiber.stack = std::move(spare_stacks().back());
      spare_stacks().pop_back();
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Run::enter), 0);
  }

  // ---- the scheduler's side
  size_t threads() const { return fibers_.size(); }
  bool finished(size_t t) const { return fibers_[t]->finished; }
  bool enabled(size_t t) const { return !finished(t) && (!fibers_[t]->ready || fibers_[t]->ready()); }
  // How many ways there are for t to go on: more than one where it chooses.
  uint32_t ways(size_t t) const { return fibers_[t]->ways; }

  void step(size_t t, uint32_t way) {
    Fiber& fiber = *fibers_[t];
    running_ = t;
    fiber.way = way;
    fiber.ready = nullptr;
    fiber.ways = 1;
    fiber.history = mixed(fiber.history, 1 + way);
    swap_exceptions(fiber);
    if (_setjmp(scheduler_jump_) == 0) {
      if (fiber.begun) _longjmp(fiber.jump, 1);
      fiber.begun = true;
      setcontext(&fiber.context);
    }
    swap_exceptions(fiber);
  }

  const std::string& thrown() const { return thrown_; }  // by a thread; empty: nothing

  uint64_t state() const {
    uint64_t hash = 1;
    for (const auto& fiber : fibers_) hash = mixed(hash, fiber->history);
    for (const uint64_t* value : values_) hash = mixed(hash, *value);
    return hash;
  }

  // ---- the threads' side
  void yield(std::function<bool()> ready = nullptr, uint32_t ways = 1) {
    if (!inside_) return;
    Fiber& fiber = *fibers_[running_];
    fiber.ready = std::move(ready);
    fiber.ways = ways;
    if (_setjmp(fiber.jump) == 0) _longjmp(scheduler_jump_, 1);  // swapcontext() would call the kernel
  }
  uint32_t choose(uint32_t ways) {
    yield(nullptr, ways);
    observe(fibers_[running_]->way);
    return fibers_[running_]->way;
  }
  void observe(uint64_t value) {
    if (inside_) fibers_[running_]->history = mixed(fibers_[running_]->history, value + 1);
  }
  void share(uint64_t* value) { values_.push_back(value); }
  void written() { writes_++; }
  void looked() {
    if (!inside_) return;
    uint64_t (&looks)[4] = fibers_[running_]->looks;
    std::shift_left(looks, looks + 4, 1);
    looks[3] = writes_;
  }
  // Until something has been written since its last loads: a thread that looked in vain need not look again
  // before.
  void pause() {
    const uint64_t seen = fibers_[running_]->looks[0];
    yield([this, seen] { return writes_ != seen; });
  }
  void start() { inside_ = true; }
  void stop() { inside_ = false; }

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  struct Fiber {
    std::function<void()> body;
    std::unique_ptr<char[]> stack;
    ucontext_t context{};  // its beginning
    jmp_buf jump{};        // where it lost its turn
    bool begun = false;
    uint64_t looks[4] = {};  // how much had been written at its last loads
    std::function<bool()> ready;
    uint32_t ways = 1, way = 0;
    uint64_t history = 0;
    bool finished = false;
    char exceptions[sizeof(void*) + sizeof(unsigned)] = {};  // what the C++ runtime keeps for each thread
  };

  // A thread may lose its turn while it handles an exception.
  static void swap_exceptions(Fiber& fiber) {
    auto* const current = reinterpret_cast<char*>(abi::__cxa_get_globals());
    std::swap_ranges(fiber.exceptions, fiber.exceptions + sizeof fiber.exceptions, current);
  }

  static std::vector<std::unique_ptr<char[]>>& spare_stacks() {
    static std::vector<std::unique_ptr<char[]>> stacks;
    return stacks;
  }

  static void enter() {
    Run& run = *current();
    Fiber& fiber = *run.fibers_[run.running_];
    try {
      fiber.body();
    } catch (const std::exception& error) {
      run.thrown_ = error.what();
    }
    fiber.finished = true;
    _longjmp(run.scheduler_jump_, 1);
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<uint64_t*> values_;
  jmp_buf scheduler_jump_{};
  std::string thrown_;
  size_t running_ = 0;
  uint64_t writes_ = 0;
  bool inside_ = false;
};

template <class T>
class Atomic {
 public:
  Atomic(T value = T{}) : value_(static_cast<uint64_t>(value)) { Run::current()->share(&value_); }
  Atomic(const Atomic&) = delete;
  template <class... Order>
  T load(Order...) const {
    Run::current()->yield();
    Run::current()->looked();
    Run::current()->observe(value_);
    return static_cast<T>(value_);
  }
  template <class... Order>
  void store(T value, Order...) {
    Run::current()->yield();
    set(value);
  }
  template <class... Order>
  T fetch_add(T by, Order...) {
    Run::current()->yield();
    Run::current()->observe(value_);
    const T old = static_cast<T>(value_);
    set(old + by);
    return old;
  }
  template <class... Order>
  bool compare_exchange_weak(T& expected, T wanted, Order...) {
    Run::current()->yield();
    Run::current()->observe(value_);
    if (static_cast<T>(value_) == expected) {
      set(wanted);
      return true;
    }
    expected = static_cast<T>(value_);
    return false;
  }

 private:
  void set(T value) {
    value_ = static_cast<uint64_t>(value);
    Run::current()->written();
  }
  uint64_t value_;
};

class Mutex {
 public:
  Mutex() { Run::current()->share(&held_); }
  void lock() {
    Run::current()->yield([this] { return held_ == 0; });
    held_ = 1;
    Run::current()->observe(turn_++);  // what lies behind the lock follows from the order of its holders
  }
  void unlock() { held_ = 0; }

 private:
  uint64_t held_ = 0, turn_ = 0;
};

class Event {
 public:
  Event() { Run::current()->share(&count_); }
  uint32_t now() const {
    Run::current()->yield();
    Run::current()->observe(count_);
    return static_cast<uint32_t>(count_);
  }
  void raise() {
    Run::current()->yield();
    count_++;
    Run::current()->written();
  }
  void wait(uint32_t seen, uint64_t) {
    Run::current()->yield([this, seen] { return count_ != seen; });
  }

 private:
  uint64_t count_ = 0;
};

struct ModelPlatform {
  template <class T>
  using Atomic = model::Atomic<T>;
  using Mutex = model::Mutex;
  using Event = model::Event;
  static void pause() { Run::current()->pause(); }
  static bool passed(uint64_t) { return false; }
};

struct Explored {
  uint64_t states = 0, steps = 0, ends = 0, runs = 0;
  double interleavings = 0;
  std::string violation;
};

// A program under test: made anew for each run, inside of it.
class Program {
 public:
  virtual ~Program() = default;
  virtual std::string wrong() const = 0;  // after each step; empty: all is well
  virtual std::string wrong_end() = 0;    // when all threads have ended
};

using Factory = std::function<std::unique_ptr<Program>(Run&)>;

class Explorer {
 public:
  explicit Explorer(Factory factory) : factory_(std::move(factory)) {}

  Explored explore() {
    pending_.push_back({});
    while (!pending_.empty() && found_.violation.empty()) {
      Path path = std::move(pending_.back());
      pending_.pop_back();
      follow(std::move(path));
    }
    found_.states = next_.size();
    if (found_.violation.empty()) found_.interleavings = paths(root_);
    return found_;
  }

 private:
  struct Choice {
    uint8_t thread, way;
  };
  using Path = std::vector<Choice>;

  void follow(Path path) {
    Run run;
    Run::current() = &run;
    const std::unique_ptr<Program> program = factory_(run);
    run.start();
    found_.runs++;
    uint64_t before = 0;
    for (size_t i = 0; i < path.size(); i++) {
      before = run.state();
      run.step(path[i].thread, path[i].way);
    }
    if (!path.empty()) found_.steps++;
    for (;;) {
      const uint64_t state = run.state();
      if (path.empty())
        root_ = state;
      else
        next_[before].push_back(state);
      found_.violation = run.thrown().empty() ? program->wrong() : run.thrown();
      if (!found_.violation.empty() || next_.contains(state)) break;
      next_[state];
      Path choices;
      bool all_ended = true;
      for (size_t t = 0; t < run.threads(); t++) {
        all_ended = all_ended && run.finished(t);
        if (!run.enabled(t)) continue;
        for (uint32_t way = 0; way < run.ways(t); way++)
          choices.push_back({static_cast<uint8_t>(t), static_cast<uint8_t>(way)});
      }
      if (choices.empty()) {
        run.stop();
        found_.violation = all_ended ? program->wrong_end() : "everybody waits, for ever";
        found_.ends++;
        break;
      }
      for (size_t i = 1; i < choices.size(); i++) {
        pending_.push_back(path);
        pending_.back().push_back(choices[i]);
      }
      path.push_back(choices[0]);
      before = state;
      run.step(choices[0].thread, choices[0].way);
      found_.steps++;
    }
    if (!found_.violation.empty()) {
      found_.violation += "; after";
      for (const Choice& c : path) found_.violation += " " + std::to_string(c.thread) + (c.way ? "!" : "");
    }
    run.stop();
  }

  double paths(uint64_t root) {
    std::unordered_map<uint64_t, double> of;
    std::vector<uint64_t> stack{root};
    while (!stack.empty()) {
      const uint64_t state = stack.back();
      bool ready = true;
      double sum = 0;
      for (const uint64_t next : next_.at(state)) {
        if (const auto it = of.find(next); it != of.end())
          sum += it->second;
        else {
          ready = false;
          stack.push_back(next);
        }
      }
      if (!ready) continue;
      of[state] = next_.at(state).empty() ? 1 : sum;
      stack.pop_back();
    }
    return of.at(root);
  }

  Factory factory_;
  Explored found_;
  uint64_t root_ = 0;
  std::vector<Path> pending_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> next_;
};

}  // namespace model
