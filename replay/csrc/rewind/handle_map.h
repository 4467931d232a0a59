// A map from handles to things, for handles that come and go with every call: one probe to find, no memory
// from the heap in steady state. Things keep their address as long as they are in the map.
#pragma once
#include <cstdint>
#include <memory>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

namespace understudy::replay {

template <class T>
class HandleMap {
 public:
  using Item = std::pair<const uint64_t, T>;

  HandleMap() = default;
  HandleMap(const HandleMap&) = delete;
  HandleMap& operator=(const HandleMap&) = delete;
  ~HandleMap() { clear(); }

  size_t size() const { return size_; }

  T* find(uint64_t handle) {
    if (size_ == 0) return nullptr;
    for (size_t i = home(handle);; i = (i + 1) & mask()) {
      const Slot& slot = slots_[i];
      if (slot.item == nullptr) return nullptr;
      if (slot.handle == handle) return &slot.item->second;
    }
  }

  // A new T for `handle`, or null if there is one already.
  template <class... Arguments>
  T* insert(uint64_t handle, Arguments&&... arguments) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    size_t i = home(handle);
    for (; slots_[i].item != nullptr; i = (i + 1) & mask())
      if (slots_[i].handle == handle) return nullptr;
    Item* item = new (take_room()) Item(std::piecewise_construct, std::forward_as_tuple(handle),
                                        std::forward_as_tuple(std::forward<Arguments>(arguments)...));
    slots_[i] = {handle, item};
    size_++;
    return &item->second;
  }

  // True if it was there.
  bool erase(uint64_t handle) {
    if (size_ == 0) return false;
    size_t hole = home(handle);
    for (;; hole = (hole + 1) & mask()) {
      if (slots_[hole].item == nullptr) return false;
      if (slots_[hole].handle == handle) break;
    }
    give_room(slots_[hole].item);
    size_--;
    // Later items of the same run move up, so that no probe ends at the hole too early.
    for (size_t i = (hole + 1) & mask(); slots_[i].item != nullptr; i = (i + 1) & mask()) {
      const size_t from_home = (i - home(slots_[i].handle)) & mask();
      if (from_home < ((i - hole) & mask())) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = {};
    return true;
  }

  void clear() {
    for (Slot& slot : slots_)
      if (slot.item != nullptr) give_room(slot.item);
    slots_.clear();
    size_ = 0;
  }

  // Over all items, in no particular order; nothing may be inserted or erased meanwhile.
  class Iterator;
  Iterator begin() { return Iterator(slots_.data(), slots_.data() + slots_.size()); }
  Iterator end() { return Iterator(slots_.data() + slots_.size(), slots_.data() + slots_.size()); }

 private:
  struct Slot {
    uint64_t handle = 0;
    Item* item = nullptr;
  };
  union Room {
    Room* next;
    alignas(Item) unsigned char bytes[sizeof(Item)];
  };
  static constexpr size_t kFirstSlots = 64, kRoomsPerSlab = 256;
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;  // spreads handles that follow each other

  size_t mask() const { return slots_.size() - 1; }
  size_t home(uint64_t handle) const { return (handle * kOdd) >> shift_; }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? kFirstSlots : 2 * slots_.size());
    old.swap(slots_);
    shift_ = 64 - __builtin_ctzll(slots_.size());
    for (const Slot& slot : old) {
      if (slot.item == nullptr) continue;
      size_t i = home(slot.handle);
      while (slots_[i].item != nullptr) i = (i + 1) & mask();
      slots_[i] = slot;
    }
  }

  void* take_room() {
    if (free_ == nullptr) {
      auto& slab = slabs_.emplace_back(std::make_unique_for_overwrite<Room[]>(kRoomsPerSlab));
      for (size_t i = kRoomsPerSlab; i-- > 0;) {
        slab[i].next = free_;
        free_ = &slab[i];
      }
    }
    return std::exchange(free_, free_->next);
  }
  void give_room(Item* item) {
    item->~Item();
    Room* room = new (static_cast<void*>(item)) Room;
    room->next = free_;
    free_ = room;
  }

  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<Room[]>> slabs_;
  Room* free_ = nullptr;
  size_t size_ = 0;
  int shift_ = 0;

 public:
  class Iterator {
   public:
    Iterator(const Slot* at, const Slot* end) : at_(at), end_(end) { skip(); }
    Item& operator*() const { return *at_->item; }
    Iterator& operator++() {
      ++at_;
      skip();
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    void skip() {
      while (at_ != end_ && at_->item == nullptr) ++at_;
    }
    const Slot* at_;
    const Slot* end_;
  };
};

}  // namespace understudy::replay
