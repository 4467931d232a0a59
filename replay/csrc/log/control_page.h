// The control page of a log, in parts by who writes them while the session runs.
//
// A part begins with a cache line of its own, so what one process writes with every record does not slow down
// who reads another one's part; within a part comments say which fields lie apart.  In a mirror on another
// host WorkerPart and ServerPart are copies, made from front to back (mirror.h): what counts or announces
// something lies in front of it.
#pragma once
#include <type_traits>
#include <utility>

#include "replay/csrc/log/log_format.h"

namespace understudy::replay {

// By nobody: fixed when proxyd creates the log.
struct alignas(64) FixedPart {
  uint64_t magic;
  uint32_t version, page_bytes;
  uint64_t segment_bytes, segment_count, dictionary_bytes, reply_bytes, shadow_bytes, snapshot_bytes;
  uint32_t rank, world;
  uint32_t proxyd_grace_s;  // so long a waiting worker hopes that a dead proxyd gets a successor
};

// By the worker.
struct alignas(64) WorkerPart {
  // With every record.
  std::atomic<uint64_t> tail;             // log offset behind the last published record
  std::atomic<uint64_t> tail_index;       // records published
  std::atomic<uint64_t> dictionary_tail;  // id behind the last template
  std::atomic<uint64_t> worker_steps;     // optimizer steps whose commits it has appended
  std::atomic<uint32_t> backpressure;     // threads of it that wait for a segment or a template region

  // Now and then. The device server looks here with every record, so it lies apart from what changes with
  // every record.
  // Templates of smaller ids are gone: changes when a region of templates is recycled.
  alignas(64) std::atomic<uint64_t> dictionary_begin;
  // It waits for an event, or asks for it: until passed_index, or that of its stream, is this; 0 = it does
  // not.
  std::atomic<uint64_t> awaited_index;
};

// By the worker, too, but not in mirrors, which have no segments.
struct alignas(64) SegmentPart {
  uint32_t of[kMaxSegments];  // physical segment of a logical one
};

// By the device server; `snapshots` and snapshot_used_bytes also by a restore, in the place of one.
struct alignas(64) ServerPart {
  // With every record: nothing that the worker reads with every record may lie in this cache line.
  std::atomic<uint64_t> cursor;  // log offset of the next record to run
  std::atomic<uint64_t> cursor_index;
  std::atomic<uint64_t> step;         // current minibatch, from 1
  std::atomic<uint64_t> call;         // records of it begun
  std::atomic<uint64_t> progress_ns;  // CLOCK_MONOTONIC of the last update
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> in_collective;  // 1 while it waits for peers
  std::atomic<uint64_t> passed_index;   // the device has done all records before this one, perhaps more

  // Now and then.
  // Where a script has several streams, as passed_index, but for each of them alone; 0 elsewhere.
  alignas(64) std::atomic<uint64_t> passed_of_stream[kStreams];
  std::atomic<uint64_t> freed_segments;  // logical segments below this may be reused
  std::atomic<uint64_t> replies_compared, replies_different;
  std::atomic<uint64_t> median_calls_per_step, median_bytes_per_step;
  std::atomic<uint32_t> degraded;  // 1 = the log was cut under pressure: no recovery until the next commit
  // 1 = no pre-images are kept in an optimizer step: no way leads out of it
  std::atomic<uint32_t> final_steps;
  std::atomic<uint32_t> sealed;  // 1 = no way leads back to its newest commit, for want of memory
  std::atomic<uint64_t> live_buffers, live_bytes, undo_bytes, shadow_used_bytes;
  std::atomic<uint64_t> snapshot_used_bytes;
  std::atomic<uint64_t> snapshots_taken, snapshot_ns;  // and what they took of the executor's time
  std::atomic<uint64_t> snapshot_begun;                // serial of the newest order that was taken up
  std::atomic<uint64_t> snapshot_failed;               // serial of the newest order that found no memory
  std::atomic<uint64_t> recent_calls[kRecentSteps];    // records of minibatch n, in n % kRecentSteps
  std::atomic<uint64_t> validated_step;                // newest minibatch whose validation has a result
  std::atomic<uint64_t> validations_failed;            // so many of them differed; the last one is told in
  char validation_message[512];
  std::atomic<uint32_t> device_lost;  // 1 = the server ends because its device is gone; why:
  char device_message[256];

  // With every collective: which one it waits for while in_collective is 1 (uid 0: one that cannot be named),
  // and how far it has come with each communicator.
  alignas(64) std::atomic<uint64_t> wait_uid_low, wait_uid_high, wait_sequence;
  std::atomic<uint32_t> started_count;
  StartedMark started[kMarksInPlace];
  // CLOCK_MONOTONIC: by a drill, no peer can be reached until then
  std::atomic<uint64_t> partitioned_until_ns;

  // With every reply.
  alignas(64) std::atomic<uint64_t> reply_sequence;

  // An asynchronous error of the program itself; sticky. The worker and the server look at error_kind with
  // every record.
  alignas(64) std::atomic<uint32_t> error_kind;
  uint64_t error_index;
  char error_operator[256];
  char error_message[4096];

  // With every commit. Commit n lies in commits[n % kCommitRing].
  alignas(64) std::atomic<uint64_t> commit_count;  // newest commit's number
  CommitEntry commits[kCommitRing];
  SnapshotEntry snapshots[kSnapshots];
};

// By proxyd, now and then.
struct alignas(64) DaemonPart {
  std::atomic<int32_t> proxyd_pid;           // who supervises; a proxyd that adopts the session writes itself
  std::atomic<uint64_t> proxyd_start_ticks;  // field 22 of /proc/PID/stat: tells a reused pid apart
  std::atomic<uint64_t> snapshot_floor;  // serial: no older snapshot will be asked for; 0 = the beginning may
  // Log offset behind the commit of a snapshot on storage, or of one that goes with CPU images: records from
  // there on stay for its sake; 0 = none.
  std::atomic<uint64_t> log_kept_from;
  // Log offset from which on records are yet to be copied to storage, and stay until then; 0 = nobody does.
  std::atomic<uint64_t> log_uncopied_from;
  std::atomic<uint32_t> snapshot_suspended;  // 1 = none is kept, and no log for their sake
  std::atomic<uint32_t> drill_count;         // of SharedPart; the server looks at it with every record
  // Serials of snapshots that are being copied to storage, or go with CPU images: contents stay, whatever the
  // floor is; 0 = none.
  std::atomic<uint64_t> snapshot_leases[kSnapshotLeases];
  std::atomic<uint64_t> snapshot_orders[kSnapshotOrders];  // see order_of(); 0 = none yet
  // Serials of ordered snapshots for which the worker is to say what the buffers are called
  // (`client-SERIAL`), each at the place of its order.
  std::atomic<uint64_t> snapshot_described[kSnapshotOrders];
  std::atomic<uint32_t> describe_steps;  // 1: and before every step's commit (`step-N`)
};

// By more than one: each field says by whom.
struct alignas(64) SharedPart {
  // The worker reads server_sleeping with every record: only what changes when somebody waits may lie in this
  // cache line.
  std::atomic<uint32_t> server_sleeping;  // server: 1 before it sleeps; worker: 0 when it wakes it
  std::atomic<uint32_t> tail_futex;       // all: there is something for the server to look at
  std::atomic<uint32_t> freed_futex;  // server, proxyd: freed_segments, or the session's state, has changed

  // The server looks at worker_sleeping whenever it has raised reply_futex.
  alignas(64) std::atomic<uint32_t> reply_futex;  // server, proxyd
  std::atomic<uint32_t> worker_sleeping;          // worker alone: waits at reply_futex

  // The worker reads session_state with every call that waits.
  alignas(64) std::atomic<uint32_t> session_state;  // proxyd, server: neither takes an end back
  // Proxyd: no commit below this one will be asked for again; server: neither, when it cut its log.
  std::atomic<uint64_t> floor_commit;
  std::atomic<uint64_t>
      validate_step;        // proxyd: the minibatch to be executed twice; server: 0 = none any more
  char lost_message[1024];  // server, proxyd: who ends the session; proxyd takes last words from here

  // A robust futex that the device server of the session holds while it lives: when it dies, the kernel sets
  // FUTEX_OWNER_DIED here and wakes who waits, before it gives any memory back (life_word.h). Of this host
  // alone: mirrors on others have 0.
  alignas(64) std::atomic<uint32_t> server_life;  // server, kernel
  // Bytes of `snapshot`, from its beginning, that lie in huge pages, as far as the device server and a
  // restore know: whether storage is best written from there. Of this host alone.
  std::atomic<uint64_t> snapshot_huge_bytes;  // server, or a restore

  alignas(64)
      Drill drills[kMaxDrills];  // proxyd: what, when and that it has done its part; server: that it fired
};

struct ControlPage {
  FixedPart fixed;
  WorkerPart worker;
  ServerPart server;
  SharedPart shared;
  DaemonPart daemon;
  SegmentPart segments;
};
static_assert(offsetof(ServerPart, passed_index) < 64, "the server's hot line is one");
static_assert(offsetof(WorkerPart, backpressure) < 64, "the worker's hot line is one");

// The control page in the hands of one of its writers: what is not its own it can only read. A reference,
// and nothing else.
template <class... Own>
class PageOf {
 public:
  explicit PageOf(ControlPage& page) : page_(page) {}
  const FixedPart& fixed() const { return page_.fixed; }
  auto& worker() const { return access(page_.worker); }
  auto& segments() const { return access(page_.segments); }
  auto& server() const { return access(page_.server); }
  auto& daemon() const { return access(page_.daemon); }
  auto& shared() const { return access(page_.shared); }

 private:
  template <class Part>
  static auto& access(Part& part) {
    if constexpr ((std::is_same_v<Part, Own> || ...))
      return part;
    else
      return std::as_const(part);
  }

  ControlPage& page_;
};
using ReaderPage = PageOf<>;
using WorkerPage = PageOf<WorkerPart, SegmentPart, SharedPart>;
using ServerPage = PageOf<ServerPart, SharedPart>;
using DaemonPage = PageOf<DaemonPart, SharedPart>;
// Of who makes a log, a copy or a mirror of one, or restores a snapshot into it: nobody else writes there
// then.
using MakerPage = PageOf<WorkerPart, SegmentPart, ServerPart, DaemonPart, SharedPart>;

// A write into another one's part does not compile.
static_assert(std::is_same_v<decltype(std::declval<WorkerPage>().worker()), WorkerPart&>);
static_assert(std::is_same_v<decltype(std::declval<WorkerPage>().server()), const ServerPart&>);
static_assert(std::is_same_v<decltype(std::declval<WorkerPage>().daemon()), const DaemonPart&>);
static_assert(std::is_same_v<decltype(std::declval<ServerPage>().server()), ServerPart&>);
static_assert(std::is_same_v<decltype(std::declval<ServerPage>().worker()), const WorkerPart&>);
static_assert(std::is_same_v<decltype(std::declval<DaemonPage>().server()), const ServerPart&>);
static_assert(std::is_same_v<decltype(std::declval<ReaderPage>().shared()), const SharedPart&>);

}  // namespace understudy::replay
