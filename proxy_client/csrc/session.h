// The session: one log, one device, opened by the first use of that device.
#pragma once
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <utility>

#include "replay/csrc/log/log_writer.h"

namespace understudy::client {

using replay::Kind;
using replay::LogWriter;

// What the session needs from Python.
struct Interpreter {
  // Asks proxyd for a session on a device (the daemon's number); returns the log's directory. Called without
  // the GIL.
  std::function<std::string(int physical_index)> open_session;
  // Runs something that may block, with the GIL released if this thread holds it.
  std::function<void(const std::function<void()>&)> without_gil;
};
void set_interpreter(Interpreter interpreter);

// The log of `device`; opens the session if there is none. Raises if the worker is bound to another device,
// if this process is a forked child, or if the session is over.
LogWriter& log_for(c10::DeviceIndex device);

// The log if a session is open and usable in this process, else null. Never opens one.
LogWriter* log_if_open() noexcept;

// The device that the session is bound to, or the calling thread's current device while there is none.
c10::DeviceIndex bound_device() noexcept;

// True in a child of a process that had a session: the device must not be used there.
bool in_bad_fork() noexcept;

// Ends the session in good order. Raises what went wrong asynchronously and nobody saw.
void close_session();

// Never reused. 0 stays unused; small numbers belong to generators.
uint64_t new_handles(uint64_t count = 1) noexcept;

[[noreturn]] void raise_as_torch_error(const replay::RemoteError& error);

// LogWriter::append and ::call, with errors as PyTorch's exceptions.
template <class Fill>
void append(LogWriter& log, Kind kind, uint64_t aux, size_t words, Fill&& fill) {
  try {
    log.append(kind, aux, words, std::forward<Fill>(fill));
  } catch (const replay::RemoteError& error) {
    raise_as_torch_error(error);
  }
}

template <class Fill, class Read>
void call(LogWriter& log, Kind kind, uint64_t aux, size_t words, Fill&& fill, Read&& read) {
  try {
    log.call(kind, aux, words, std::forward<Fill>(fill), std::forward<Read>(read));
  } catch (const replay::RemoteError& error) {
    raise_as_torch_error(error);
  }
}

inline void append(LogWriter& log, Kind kind, uint64_t aux) {
  append(log, kind, aux, 0, [](uint64_t*) {});
}
inline void append_word(LogWriter& log, Kind kind, uint64_t aux, uint64_t word) {
  append(log, kind, aux, 1, [word](uint64_t* body) { *body = word; });
}

// Raises an asynchronous error of the program, or the loss of the session, if there was one.
inline void raise_if_failed(const LogWriter& log) {
  try {
    log.raise_if_failed();
  } catch (const replay::RemoteError& error) {
    raise_as_torch_error(error);
  }
}

// Waits until the device server has run everything appended so far, and for what else `what` says. Nothing to
// do without a session.
// `of`: the communicator of a barrier, or a mark.
void synchronize(replay::WaitFor what = replay::WaitFor::kEverything, uint64_t of = 0);

// The number of the next record; 0 without a session.
uint64_t next_record();
// Waits until the device has done all records of `stream` before that one, and for nothing behind them;
// `mark`: of the stream there, if it has one.
void wait_for_records_before(uint64_t index, uint64_t stream, uint64_t mark);
// Whether it has done them. Who asks until it has, waits.
bool has_passed(uint64_t index, uint64_t stream);
// Whether it has done all that there is of `stream`.
bool has_passed_all(uint64_t stream);
// Records say on which stream they lie, from here on, or from the session's beginning.
void use_streams();

// Commit marks (design §4). Nothing to do without a session.
void begin_optimizer_phase();
void commit_step();
// The serial of a snapshot that proxyd wants of the step whose commit comes next, and wants described; else
// 0.
uint64_t snapshot_to_describe();
// The step whose commit comes next, if every one is to be described; else 0.
uint64_t step_to_describe();
// To be called where the worker has just received a value: commits if much was appended since the last
// commit, so that long stretches without an optimizer step (evaluation, generation) do not grow the log
// without bound.
void commit_if_due();
// Commits behind some collectives of all ranks, as long as no optimizer has stepped: on every rank behind the
// same ones, whatever each of them reads and when.
void commit_after_collective(LogWriter& log, int ranks, uint64_t number);
// Whether records were appended that the device server has not run yet.
bool device_is_busy();

}  // namespace understudy::client
