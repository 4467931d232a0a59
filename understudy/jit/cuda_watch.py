"""What happens on NCCL's streams, and saves past one that hangs (paper 001 §3.1-3.2).

The C++ part, `libunderstudy_cuda_watch.so`, stands in front of CUDA and NCCL by LD_PRELOAD; `preload()` says
where it lies. This is the Python side of it, which reads counters and never waits for CUDA by itself. Where
the library is not loaded (every CPU build of PyTorch) nothing of CUDA is touched, and nothing is counted.

A script enqueues work and goes on, so what the host counts as done may be far from done. So before
parameters change, the training thread waits for the collectives that are under way (`settle`): one that hangs
then leaves the device and the script in the same step. And before a save copies anything, which it does past
the training's streams, the device must have come to the end of the last step (`saving`).
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .identity import JitError

LIBRARY = "libunderstudy_cuda_watch.so"
_VERSION = 1
_PREFIX = "understudy_cuda_watch_"
_STREAMS = 64
_NOT_READY = 600
"""cudaErrorNotReady."""
_BETWEEN_LOOKS = 0.005
_TO_END = 1.0
"""Seconds for work that was enqueued in the step that a save falls into."""
_STEPS_UNTIL_REMARK = 3

Count = tuple[str, int, int]
"""As the watchdog's: a name, collectives begun, collectives ended."""


def preload() -> Path:
    """The library, for LD_PRELOAD. Raises JitError where it was not built."""
    path = Path(__file__).resolve().with_name(LIBRARY)
    if not path.is_file():
        raise JitError(f"{LIBRARY} is not installed beside {Path(__file__).name}; run `make setup`.")
    return path


class _Facts(ctypes.Structure):
    """StreamFacts of csrc/cuda_watch/watched_stream.h."""

    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("waiting", ctypes.c_int32),
        ("begun", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
        ("waits", ctypes.c_uint64),
        ("moved_marks", ctypes.c_uint64),
        ("oldest", ctypes.c_double),
    )


class _Totals(ctypes.Structure):
    """Totals of csrc/cuda_watch/watch.h."""

    _fields_ = (
        ("nccl_calls", ctypes.c_uint64),
        ("captured", ctypes.c_uint64),
        ("unmarked", ctypes.c_uint64),
        ("streams_left_out", ctypes.c_uint64),
        ("copies_of_saves", ctypes.c_uint64),
        ("query_error", ctypes.c_int32),
        ("streams", ctypes.c_int32),
    )


@dataclass(frozen=True)
class CommunicationStream:
    """One stream that NCCL was given."""

    device: int
    begun: int
    """Collectives."""
    ended: int
    waited_for: bool
    """Whether another stream waits for one that has not ended."""
    oldest: float
    """Seconds since the oldest that has not ended began; 0: all have."""


@dataclass(frozen=True)
class Seen:
    """At one moment. `streams` in the order in which NCCL was given them."""

    streams: tuple[CommunicationStream, ...] = ()
    nccl_calls: int = 0
    captured: int = 0
    """NCCL calls into graphs, which are not watched."""
    unmarked: int = 0
    """NCCL calls behind which no event could be recorded: they count as ended."""
    streams_left_out: int = 0
    copies_of_saves: int = 0
    query_error: int = 0
    """The last error of cudaEventQuery, 0: none."""


class Streams(Protocol):
    """What PyTorch knows of devices."""

    def current(self) -> Sequence[tuple[int, int]]:
        """Devices that this process uses, and for each the stream that this thread computes on. The thread's
        own device is the last."""

    def use(self, device: int, stream: int) -> contextlib.AbstractContextManager[None]:
        """What this thread computes and copies on that device goes to that stream."""

    def nccl_is_up(self) -> bool:
        """Whether the job's collectives of CUDA tensors go by NCCL."""


class TorchStreams:
    """PyTorch's. A device that is not in use yet is not made to start."""

    def current(self) -> Sequence[tuple[int, int]]:
        import torch

        if not torch.cuda.is_initialized():
            return ()
        own = torch.cuda.current_device()
        in_use = [n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)]
        in_use.sort(key=lambda device: device == own)
        return [(device, torch.cuda.current_stream(device).cuda_stream) for device in in_use]

    @contextlib.contextmanager
    def use(self, device: int, stream: int) -> Iterator[None]:
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            yield

    def nccl_is_up(self) -> bool:
        import torch
        import torch.distributed as dist

        in_use = torch.version.cuda is not None and torch.cuda.is_initialized() and dist.is_available()
        return in_use and dist.is_initialized() and "nccl" in dist.get_backend_config()


class CudaWatch:
    """The library, where it is loaded; else nothing happens here. `say` is told what users should know."""

    def __init__(self, say: Callable[[str], None], streams: Streams | None = None) -> None:
        self._library, self._say = _loaded(), say
        self._streams: Streams = streams if streams is not None else TorchStreams()
        self._computes: tuple[tuple[int, int], ...] = ()
        """Devices and streams of the training, at the last boundary."""
        self._told: set[str] = set()

    @property
    def is_loaded(self) -> bool:
        return self._library is not None

    def start(self) -> None:
        """Says what is missing, if this job needs it as far as can be seen."""
        if self._library is None and self._streams.nccl_is_up():
            self._tell_once(
                "NCCL's collectives are not watched, and a save would wait for one that hangs; start the "
                'script with LD_PRELOAD="$(python -m understudy.jit preload)" in its environment.'
            )

    def seen(self) -> Seen:
        """In any thread. A fork of a process that is watched sees nothing."""
        if self._library is None:
            return Seen()
        totals, room = _Totals(), (_Facts * _STREAMS)()
        count = self._library.understudy_cuda_watch_facts(room, _STREAMS, ctypes.byref(totals))
        streams = tuple(
            CommunicationStream(one.device, one.begun, one.ended, bool(one.waiting), one.oldest)
            for one in room[:count]
        )
        return Seen(
            streams, totals.nccl_calls, totals.captured, totals.unmarked, totals.streams_left_out,
            totals.copies_of_saves, totals.query_error,
        )  # fmt: skip

    def counts(self) -> tuple[Count, ...]:
        """As `watchdog.counts`, one for each communication stream."""
        if self._library is None:
            return ()
        return tuple(
            (f"cuda:{one.device} stream {number}", one.begun, one.ended)
            for number, one in enumerate(self.seen().streams)
        )

    def settle(self) -> None:
        """Parameters are about to change: wait for the collectives that are under way, however long.

        In the thread that trains. An error of the device is PyTorch's to raise, at its next call.
        """
        if self._library is not None:
            for _, stream in self._streams.current():
                self._library.understudy_cuda_watch_settle(stream)

    def boundary(self) -> None:
        """A step ends here, as far as the script has enqueued it (in the thread that trains)."""
        if self._library is None:
            return
        self._computes = tuple(self._streams.current())
        for device, stream in self._computes:
            self._library.understudy_cuda_watch_boundary(device, stream)

    @contextlib.contextmanager
    def saving(self, within: float) -> Iterator[None]:
        """What this thread copies goes to streams of its own, behind the end of the last step alone.

        `within`: seconds, for the devices to come to that end. Raises JitError if one does not.
        """
        library = self._library
        if library is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            library.understudy_cuda_watch_begin_save()
            stack.callback(library.understudy_cuda_watch_end_save)
            deadline = time.monotonic() + within
            for device, compute in self._computes:
                stream = library.understudy_cuda_watch_save_stream(device)
                if not stream:
                    raise JitError(f"no stream to copy from could be made on cuda:{device}.")
                self._await_boundary(device, deadline, within)
                self._await_idle(compute, min(_TO_END, within / 4))
                stack.enter_context(self._streams.use(device, stream))
            yield

    def _await_boundary(self, device: int, deadline: float, within: float) -> None:
        assert self._library is not None
        while (answer := self._library.understudy_cuda_watch_boundary_reached(device)) == _NOT_READY:
            if time.monotonic() > deadline:
                raise JitError(
                    f"cuda:{device} has not come to the end of the last step in {within:g} s: a collective "
                    "hangs between the optimizer's step and its end; call jit.boundary() in front of it."
                )
            time.sleep(_BETWEEN_LOOKS)
        if answer < 0:
            raise JitError(
                f"on cuda:{device} the end of the last step could not be marked (a graph was captured there, "
                "or an error was pending), so that nobody knows what a copy would be of."
            )
        if answer > 0:
            raise JitError(f"cuda:{device} answers with CUDA's error {answer}; its state is lost.")

    def _await_idle(self, stream: int, within: float) -> None:
        """What the training has enqueued may still change buffers. Behind what hangs it never will."""
        assert self._library is not None
        deadline = time.monotonic() + within
        while self._library.understudy_cuda_watch_is_idle(stream) == _NOT_READY:
            if time.monotonic() > deadline:
                return
            time.sleep(_BETWEEN_LOOKS)

    def remark(self, steps: int) -> None:
        """Says, once each, what is not watched although it should be. `steps`: of this process so far."""
        if steps < _STEPS_UNTIL_REMARK:
            return
        self.start()
        if self._library is None:
            return
        seen = self.seen()
        if seen.nccl_calls == 0 and self._streams.nccl_is_up():
            self._tell_once(
                "no call of NCCL was seen in the first steps, so that one that hangs will not be; this is so "
                "where NCCL or CUDA's runtime is linked into a library statically, or found with dlsym."
            )
        if seen.captured:
            self._tell_once("collectives in CUDA graphs are not watched: one that hangs there is not seen.")
        if seen.streams_left_out:
            self._tell_once(f"NCCL uses more than {_STREAMS} streams, and those beyond are not watched.")
        if seen.unmarked:
            self._tell_once("behind some of NCCL's calls no event could be recorded; they are not watched.")

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)


def _loaded() -> Any:
    """The library, if LD_PRELOAD has loaded it into this process; None otherwise."""
    process = ctypes.CDLL(None)
    try:
        if getattr(process, f"{_PREFIX}version")() != _VERSION:  # another installation's
            return None
    except AttributeError:
        return None
    signatures: dict[str, tuple[list[Any], Any]] = {
        "facts": ([ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p], ctypes.c_int),
        "begin_save": ([], None),
        "end_save": ([], None),
        "save_stream": ([ctypes.c_int], ctypes.c_void_p),
        "is_idle": ([ctypes.c_void_p], ctypes.c_int),
        "settle": ([ctypes.c_void_p], ctypes.c_int),
        "boundary": ([ctypes.c_int, ctypes.c_void_p], ctypes.c_int),
        "boundary_reached": ([ctypes.c_int], ctypes.c_int),
    }
    for name, (parameters, result) in signatures.items():
        function = getattr(process, _PREFIX + name)
        function.argtypes, function.restype = parameters, result
    return process
