// Rewind rules (design.md section 6): which content must be kept so that every buffer can go back to a
// commit.
//
// An epoch is the stretch between two commits; epoch e begins at commit e, epoch 0 at the empty beginning.
// A buffer born in epoch b is alive at commit t only if b < t. To go back to commit t:
//   1. buffers born in epochs >= t are forgotten;
//   2. buffers written in epochs >= t get their pre-image of the oldest such epoch back;
//   3. buffers freed in epochs >= t come back. If replay from any commit that can still be asked for would
//   not
//      touch them, only their name and size were kept (a later read is an error, never garbage).
// Every first write of an epoch takes a pre-image, a whole overwrite too: a rank's own replay would not need
// that one, but a dead peer that copies this commit from here does.
#pragma once
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "replay/csrc/rewind/handle_map.h"
#include "replay/csrc/rewind/usage.h"

namespace understudy::replay {

struct RewindError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Replay wants a content that nobody kept. Of a rank that was restored with the state of others, one of these
// had an equal one by chance, and let go of it since.
struct ContentLost : RewindError {
  using RewindError::RewindError;
};

// A store has no memory for one more copy.
struct NoRoom : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Who takes a snapshot copies contents later than the commit they belong to: it is called before a content it
// still waits for (Buffer::captured) changes or goes.
class Capture {
 public:
  virtual void before_change(uint64_t handle, uint32_t captured) = 0;

 protected:
  ~Capture() = default;
};

// `Store` knows how to keep contents: copy(content), which may throw NoRoom, bring_back(content, its copy),
// hollow(content) (same size, no content), recycle(content), bytes(content).
template <class Content, class Store>
class BufferTable {
 public:
  struct Buffer {
    Content content;
    uint64_t born = 0;        // epoch
    uint64_t saved = 0;       // newest epoch whose pre-image exists or is not needed
    uint64_t touched = 0;     // newest epoch that used it
    uint64_t version = 0;     // grows with every change of the content
    bool available = true;    // false: only name and size survived a rewind
    bool replicated = false;  // a replica holds equal content: needs no shadow
    bool in_flight = false;   // a collective still works on it
    uint64_t digest_version = ~0ull, digest = 0;
    uint64_t committed_digest = 0;  // of the content at the newest commit; 0: none was taken
    uint64_t shadow_version = ~0ull, shadow_offset = 0;
    uint64_t snapshot_version = ~0ull, snapshot_offset = 0;
    uint32_t captured = 0;  // its row, from 1, in a snapshot that still has to copy it
  };

  explicit BufferTable(Store& store) : store_(store) { epochs_.emplace_back(); }

  // keep = false: nothing is kept and rewind() is refused (a rank without peers).
  void protect(bool keep) { protect_ = keep; }
  // While false, writes take no pre-image and the commits before them are out of reach.
  void preimages(bool on) { preimages_ = on; }
  // What the program wants to compute comes first: what is kept makes room for it, and the commits that it is
  // of cannot be reached any more.
  void make_room() {
    seal();
    for (Epoch& e : epochs_) {
      forget(e);
      e.preimages.clear();
      e.freed.clear();
    }
  }
  // Neither this epoch's commit nor one before can be reached any more.
  void seal() { unreachable_below_ = epoch_ + 1; }
  bool sealed() const { return unreachable_below_ > epoch_; }
  void set_capture(Capture* capture) { capture_ = capture; }

  uint64_t epoch() const { return epoch_; }
  // The oldest commit rewind() can reach; above epoch() while none can be.
  uint64_t oldest() const { return oldest_ > unreachable_below_ ? oldest_ : unreachable_below_; }
  size_t size() const { return buffers_.size(); }
  uint64_t undo_bytes() const { return undo_bytes_; }
  uint64_t live_bytes() const { return usage_.bytes().current; }
  Usage& usage() { return usage_; }
  HandleMap<Buffer>& buffers() { return buffers_; }

  // `content`: whatever a Content can be assigned; it is made in its place.
  template <class Made>
  Buffer& create(uint64_t handle, Made&& content) {
    Buffer* b = buffers_.insert(handle);
    if (b == nullptr) throw RewindError("handle " + std::to_string(handle) + " is created twice");
    b->content = std::forward<Made>(content);
    usage_.add(store_.bytes(b->content));
    b->born = b->saved = b->touched = epoch_;
    return *b;
  }

  Buffer* find(uint64_t handle) { return buffers_.find(handle); }

  Buffer& read(uint64_t handle) {
    Buffer* b = find(handle);
    if (b == nullptr) throw RewindError("unknown handle " + std::to_string(handle));
    if (!b->available)
      throw ContentLost("the content of buffer " + std::to_string(handle) +
                        " was not kept, but replay reads it");
    b->touched = epoch_;
    return *b;
  }

  // Call before the content changes.
  Buffer& write(uint64_t handle) {
    Buffer& b = read(handle);
    begin_write(handle, b);
    return b;
  }
  void begin_write(uint64_t handle, Buffer& b) {
    if (__builtin_expect(b.captured != 0, 0)) let_capture(handle, b);
    b.version++;
    if (b.saved != epoch_) save(handle, b);
  }

  // Call before the content goes elsewhere, as it is.
  void begin_move(uint64_t handle) {
    Buffer& b = read(handle);
    if (b.captured != 0) let_capture(handle, b);
  }

  // The buffer's storage becomes another one (a resize).
  void replace(uint64_t handle, Content content) {
    Buffer& b = write(handle);
    usage_.remove(store_.bytes(b.content));
    usage_.add(store_.bytes(content));
    b.content = std::move(content);
  }

  void free(uint64_t handle) {
    Buffer* found = buffers_.find(handle);
    if (found == nullptr) throw RewindError("handle " + std::to_string(handle) + " is freed but not alive");
    Buffer& b = *found;
    if (__builtin_expect(b.captured != 0, 0)) let_capture(handle, b);
    usage_.remove(store_.bytes(b.content));
    if (protect_ && !sealed() && b.born < epoch_) {
      const uint64_t first =
          b.born + 1 > oldest_ ? b.born + 1 : oldest_;  // oldest commit that could want it back
      if (b.touched < first) b.available = false;
      Epoch& e = epochs_.back();
      if (b.available) undo_bytes_ += store_.bytes(b.content);
      b.in_flight = false;  // who rewinds has waited for all collectives, and must not look for this one
      e.freed.emplace_back(handle, b.available ? std::move(b) : hollow(b));
    }
    buffers_.erase(handle);
  }

  // Ends the epoch; returns the number of the new commit.
  uint64_t commit() {
    epoch_++;
    epochs_.emplace_back();
    if (!protect_) release(epoch_);
    release(unreachable_below_);
    return epoch_;
  }

  // No commit below `floor` will be asked for again.
  void release(uint64_t floor) {
    while (oldest_ < floor && oldest_ < epoch_) {
      forget(epochs_.front());
      epochs_.pop_front();
      oldest_++;
    }
  }

  // Back to commit `target`. Returns the bytes brought back.
  uint64_t rewind(uint64_t target) {
    if (!protect_ && target != 0) throw RewindError("this rank keeps no pre-images");
    if (target > epoch_ || target < oldest())
      throw RewindError("commit " + std::to_string(target) + " is out of reach (" + std::to_string(oldest()) +
                        " to " + std::to_string(epoch_) + " can be had)");
    uint64_t restored = 0;
    for (;; epoch_--) {
      Epoch& e = epochs_.back();
      for (auto& [handle, b] : e.freed) {
        if (b.available) undo_bytes_ -= store_.bytes(b.content);
        forget(handle);              // one made since, that was given the same handle
        b.snapshot_version = ~0ull;  // whoever let go of snapshots meanwhile did not find it in the table
        usage_.add(store_.bytes(b.content));
        buffers_.insert(handle, std::move(b));
      }
      e.freed.clear();
      for (auto& [handle, content] : e.preimages) {
        undo_bytes_ -= store_.bytes(content);
        Buffer* found = buffers_.find(handle);
        if (found == nullptr) throw RewindError("a pre-image has lost its buffer");
        Buffer& b = *found;
        restored += store_.bytes(content);
        usage_.remove(store_.bytes(b.content));
        usage_.add(store_.bytes(content));
        store_.bring_back(b.content, std::move(content));
        b.version++;
        b.saved = epoch_ == 0 ? 0 : epoch_ - 1;
      }
      e.preimages.clear();
      if (epoch_ == target) break;
      epochs_.pop_back();
    }
    std::vector<uint64_t> born_later;
    for (auto& [handle, b] : buffers_) {
      if (b.born >= target) born_later.push_back(handle);
      if (b.saved >= target) b.saved = target - 1;
      if (b.touched >= target) b.touched = target - 1;
    }
    for (const uint64_t handle : born_later) forget(handle);
    return restored;
  }

  // A fresh table that stands at commit `number` (its buffers follow by adopt()).
  void start_at(uint64_t number) {
    buffers_.clear();
    epochs_.clear();
    epochs_.emplace_back();
    undo_bytes_ = 0;
    usage_.clear();
    epoch_ = oldest_ = number;
    unreachable_below_ = 0;
  }
  Buffer& adopt(uint64_t handle, Content content, bool available) {
    Buffer& b = create(handle, std::move(content));
    b.born = b.saved = b.touched = epoch_ - 1;
    b.available = available;
    return b;
  }

 private:
  void let_capture(uint64_t handle, Buffer& b) {
    const uint32_t captured = b.captured;
    b.captured = 0;
    capture_->before_change(handle, captured);
  }

  struct Epoch {
    std::vector<std::pair<uint64_t, Content>> preimages;
    std::vector<std::pair<uint64_t, Buffer>> freed;
  };

  // It counts as saved only when it is: who asked may try again behind an error.
  void save(uint64_t handle, Buffer& b) {
    if (protect_ && !sealed()) {
      if (preimages_)
        keep(handle, b);
      else
        seal();  // from here on only later commits can be reached
    }
    b.saved = epoch_;
  }

  void keep(uint64_t handle, Buffer& b) {
    try {
      epochs_.back().preimages.emplace_back(handle, store_.copy(b.content));
      undo_bytes_ += store_.bytes(b.content);
    } catch (const NoRoom&) {
      make_room();
    }
  }

  Buffer hollow(Buffer& b) {
    Buffer copy;
    copy.content = store_.hollow(b.content);
    store_.recycle(std::move(b.content));
    copy.born = b.born;
    copy.saved = b.saved;
    copy.touched = b.touched;
    copy.version = b.version;
    copy.available = false;
    copy.replicated = b.replicated;
    return copy;
  }

  void forget(uint64_t handle) {
    Buffer* b = buffers_.find(handle);
    if (b == nullptr) return;
    usage_.remove(store_.bytes(b->content));
    buffers_.erase(handle);
  }

  void forget(Epoch& e) {
    for (auto& [handle, content] : e.preimages) {
      undo_bytes_ -= store_.bytes(content);
      store_.recycle(std::move(content));
    }
    for (auto& [handle, b] : e.freed)
      if (b.available) {
        undo_bytes_ -= store_.bytes(b.content);
        store_.recycle(std::move(b.content));
      }
  }

  Store& store_;
  HandleMap<Buffer> buffers_;
  std::deque<Epoch> epochs_;  // epochs oldest_ .. epoch_
  uint64_t epoch_ = 0, oldest_ = 0, unreachable_below_ = 0;
  uint64_t undo_bytes_ = 0;
  Usage usage_;
  bool protect_ = true, preimages_ = true;
  Capture* capture_ = nullptr;
};

}  // namespace understudy::replay
