// Threads that wait for what can only be waited for: Gloo's messages do not say whether they are done.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace understudy::server {

// Something that happens once.
class Event {
 public:
  void tell();
  void wait();
  bool is_over() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
};

class TellsAtEnd {
 public:
  explicit TellsAtEnd(Event& event) : event_(event) {}
  ~TellsAtEnd() { event_.tell(); }
  TellsAtEnd(const TellsAtEnd&) = delete;
  TellsAtEnd& operator=(const TellsAtEnd&) = delete;

 private:
  Event& event_;
};

// One wait that another thread does.
class Waiting {
 public:
  // Runs `wait` on a thread of the pool, which grows as many as wait at once. Both live on until it returns,
  // whoever forgets them.
  static std::shared_ptr<Waiting> begin(std::function<void()> wait);

  bool is_over() const;
  // Returns early with false once `given_up` says so; raises what the wait raised.
  bool wait(const std::function<bool()>& given_up);

 private:
  friend class WaiterPool;
  void run();

  std::function<void()> wait_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::exception_ptr problem_;
};

}  // namespace understudy::server
