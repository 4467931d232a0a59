// Where slots lie: a file, a raw partition, or mapped persistent memory.  Everything above this interface is
// the same for all of them, and tests put a recorder of writes and syncs in its place.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

namespace understudy::persistence {

// What the storage did not do; code() is the error number (ENOSPC, EIO, EROFS, …).
class StorageError : public std::system_error {
 public:
  StorageError(int number, const std::string& what)
      : std::system_error(number, std::generic_category(), what) {}
};

// One thread's way to write.  Not shared between threads.
class Writer {
 public:
  virtual ~Writer() = default;
  // Begins to write `bytes` at `offset`.  The memory must stay as it is until wait() has answered `token`.
  // Offset, length and memory are multiples of the storage's alignment().  Throws StorageError.
  virtual void submit(uint64_t offset, const uint8_t* data, uint64_t bytes, uint64_t token) = 0;
  // How many writes may be under way at a time.
  virtual uint32_t depth() const = 0;
  // Waits for a write that was submitted; answers its token.  Throws StorageError (also for a short write
  // that cannot be completed).  Precondition: something is under way.
  virtual uint64_t wait() = 0;
};

// One thread's way to read.  Not shared between threads; its destructor waits for what is under way.
class Reader {
 public:
  struct Ended {
    uint64_t token;
    bool read;  // false: the storage cannot (EIO), and the memory holds anything
  };

  virtual ~Reader() = default;
  // Begins to read `bytes` at `offset`; the memory is the storage's until wait() has answered `token`.  Same
  // alignment as Storage::read().  Throws StorageError.
  virtual void submit(uint64_t offset, uint8_t* to, uint64_t bytes, uint64_t token) = 0;
  virtual uint32_t depth() const = 0;
  // Waits for a read that was submitted.  Throws StorageError for whatever is no EIO.  Precondition:
  // something is under way.
  virtual Ended wait() = 0;
};

class Storage {
 public:
  virtual ~Storage() = default;
  virtual const std::string& name() const = 0;  // for messages
  virtual const char* engine() const = 0;  // "uring", "direct", "buffered", "mmap", "dax", "dax (emulated)"
  virtual uint64_t bytes() const = 0;      // capacity
  virtual uint32_t alignment() const = 0;  // of offsets, lengths and memory; a power of two, at most 4096
  virtual std::unique_ptr<Writer> writer() = 0;
  // What any writer has finished (wait() has answered) is durable when this returns.  Any thread.
  virtual void sync() = 0;
  // The same for a range only, where the engine can do that (syncs_ranges(): mmap, dax); otherwise sync().
  virtual void sync(uint64_t offset, uint64_t bytes) = 0;
  virtual bool syncs_ranges() const { return false; }
  // Any thread; same alignment.  Throws StorageError, also beyond the end.
  virtual void read(uint64_t offset, uint8_t* data, uint64_t bytes) const = 0;
  // By default one whose reads are over when submit() returns.
  virtual std::unique_ptr<Reader> reader() const;
};

enum class Engine { kAuto, kUring, kDirect, kBuffered, kMmap, kDax };

// Makes a file of `bytes`, all blocks allocated and durable (file and directory entry), owner-only (0600);
// refuses one that exists (EEXIST).  A block device is not created.
void create_file(const std::string& path, uint64_t bytes);
// kAuto: DAX where the file is, else uring, direct, buffered: the first that works there; why the others do
// not is in `notes`, a sentence each.  `writable` false: nothing is ever written (O_RDONLY).
std::unique_ptr<Storage> open_storage(const std::string& path, Engine engine, bool writable,
                                      std::string* notes = nullptr);

}  // namespace understudy::persistence
