"""How often to take snapshots, and how many at a time: PCcheck (ASPLOS'25), section 3.4.

Pure: measurements and limits in, a choice out.  Symbols in brackets are the paper's (its Table 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from understudy.recovery.base.errors import BadInput

CHUNK_S = 0.01
"""A chunk is what the device hands over in this time: what one copy and one write cost to begin, some
0.1 ms, is then about 1 %.  At the 12 GB/s of PCIe 3 x16 that is 120 MB; the paper found 100 to 500."""
SMALLEST_CHUNK = 1 << 20
"""Bytes; writes below it are slower than the storage.  State smaller than that is one chunk."""
ALIGNMENT = 4096
"""Bytes; direct I/O writes whole pages."""
THREADS = 3
"""Without a measured sweep: the middle of the paper's "ideally 2 to 4", and what its Figure 13 found best."""
MOST_IN_FLIGHT = 1024


class CannotTune(BadInput):
    """What was measured, or what the user allows, admits no snapshots; its text is the sentence to print."""


@dataclass(frozen=True)
class Measured:
    """What the machine and the training can do.  Raises CannotTune on values that no measurement gives."""

    step_s: float
    """[t] seconds per training step while nothing is written."""
    state_bytes: int
    """[m] of one snapshot."""
    device_to_host_bytes_s: float
    """[T_G] bytes per second from the device into pinned host memory."""
    write_time_s: Mapping[int, float]
    """[T_w] number of snapshots under way at once [N] -> seconds from copying one until it is durable."""
    storage_bytes_s: float
    """[T_S] bytes per second onto the storage, by however many writers it takes."""
    slowdown_while_persisting: float = 1.0
    """Time of a step while snapshots are under way, stops for copying included, over `step_s`; at least 1.
    1 is what the paper assumes: that persisting takes nothing from training."""
    thread_time_s: Mapping[int, float] = field(default_factory=dict)
    """Writer threads [p] -> seconds to write one snapshot; empty: not measured."""

    def __post_init__(self) -> None:
        for name in ("step_s", "state_bytes", "device_to_host_bytes_s", "storage_bytes_s"):
            _positive(getattr(self, name), name)
        if not self.write_time_s:
            raise CannotTune("no write time was measured: measure T_w with at least one snapshot under way")
        for name in ("write_time_s", "thread_time_s"):
            for count, seconds in getattr(self, name).items():
                if not 1 <= count <= MOST_IN_FLIGHT:
                    raise CannotTune(f"{name} has an entry for {count}: 1 to {MOST_IN_FLIGHT} are possible")
                _positive(seconds, f"{name} of {count}")
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))  # nobody else's
        if not 1 <= self.slowdown_while_persisting < math.inf:
            raise CannotTune(
                f"slowdown_while_persisting is {self.slowdown_while_persisting}: "
                "it is a factor on the step time, 1 or more"
            )


@dataclass(frozen=True)
class Limits:
    """What the user allows.  Raises CannotTune on values that allow nothing."""

    dram_bytes: int
    """[M] host memory for chunks."""
    storage_bytes: int
    """[S] room for snapshots."""
    overhead: float
    """[q] training time with snapshots over training time without them, as a factor: 1.03 for 3 %."""

    def __post_init__(self) -> None:
        _positive(self.dram_bytes, "dram_bytes")
        _positive(self.storage_bytes, "storage_bytes")
        if not 1 < self.overhead < math.inf:
            raise CannotTune(
                f"an overhead of {self.overhead} leaves no time for snapshots: "
                "it is a factor on the training time above 1, such as 1.03"
            )


@dataclass(frozen=True)
class Choice:
    """How to take snapshots."""

    in_flight: int
    """[N*] snapshots under way at once; the storage holds one more."""
    threads: int
    """[p] writers per snapshot."""
    chunk_bytes: int
    """[b]"""
    chunks: int
    """[c] of them in host memory."""
    interval: int
    """[f*] steps from one snapshot to the next."""
    explained: tuple[str, ...]
    """One sentence per decision, in the order of the fields."""


def tune(measured: Measured, limits: Limits) -> Choice:
    """The shortest interval that keeps training within `limits.overhead`.

    The interval is `interval_within`, not the paper's own `interval_by_paper`: that one relies on writing
    taking nothing from training, and where it does take something, exceeds q for every q below that.
    Raises CannotTune if storage or host memory do not suffice.
    """
    most = most_in_flight(measured, limits)
    chunk = chunk_bytes(measured, limits)
    count = best_in_flight(measured, most)
    threads, why_threads = _threads(measured)
    # More than the snapshots under way hold together would never be filled.
    chunks = min(limits.dram_bytes // chunk, count * -(-measured.state_bytes // chunk))
    interval = interval_within(measured, count, limits.overhead)
    explained = (
        _why_in_flight(measured, limits, count, most),
        why_threads,
        _why_chunks(measured, limits, chunk, chunks),
        _why_interval(measured, limits, count, interval),
    )
    return Choice(count, threads, chunk, chunks, interval, explained)


# ------------------------------------------------------------------ N
def most_in_flight(measured: Measured, limits: Limits) -> int:
    """Snapshots [N] that may be under way at once: N <= S/m - 1, as the newest durable one stays.

    Raises CannotTune where not even two slots fit.
    """
    slots = limits.storage_bytes // measured.state_bytes
    if slots < 2:
        raise CannotTune(
            f"{size(limits.storage_bytes)} of storage do not hold two snapshots of "
            f"{size(measured.state_bytes)} each, one durable and one being written: "
            f"give at least {size(2 * measured.state_bytes)}"
        )
    return slots - 1


def write_time(measured: Measured, in_flight: int) -> float:
    """T_w in seconds with `in_flight` [N] snapshots under way; where N was not measured, rather too long.

    Below all measured N: that of the smallest, as fewer writers never make one slower.  Between two: on the
    line through them, which lies above the curve because contention makes it convex.  Above all: in
    proportion to N, nothing being left of the bandwidth.  Never below m N / T_S, which is the storage's.
    """
    times = measured.write_time_s
    if in_flight in times:
        return times[in_flight]
    below = max((n for n in times if n < in_flight), default=0)
    above = min((n for n in times if n > in_flight), default=0)
    if not below:
        guess = times[above]
    elif not above:
        guess = times[below] * in_flight / below
    else:
        share = (in_flight - below) / (above - below)
        guess = times[below] + share * (times[above] - times[below])
    return max(guess, measured.state_bytes * in_flight / measured.storage_bytes_s)


def best_in_flight(measured: Measured, most: int) -> int:
    """N*: the N in 1..most with the smallest T_w / N; of equals the smallest.

    Nothing above the largest measured N is tried: `write_time` promises no gain there.
    """
    candidates = range(1, min(most, max(measured.write_time_s)) + 1)
    return min(candidates, key=lambda n: (write_time(measured, n) / n, n))


# ------------------------------------------------------------------ b, p
def chunk_bytes(measured: Measured, limits: Limits) -> int:
    """b: what saturates T_G (`CHUNK_S` of it), in whole pages.

    Two fit into M, so that copying and writing overlap, unless they would be below `SMALLEST_CHUNK`.  Raises
    CannotTune if M is below one chunk of that size, or of the state if that is less.
    """
    whole = -(-measured.state_bytes // ALIGNMENT) * ALIGNMENT
    smallest = min(SMALLEST_CHUNK, whole)
    if limits.dram_bytes < smallest:
        raise CannotTune(
            f"{size(limits.dram_bytes)} of host memory are less than one chunk of {size(smallest)}: "
            "give at least that, better the size of a snapshot"
        )
    saturating = int(measured.device_to_host_bytes_s * CHUNK_S)
    wanted = min(saturating, limits.dram_bytes // 2) // ALIGNMENT * ALIGNMENT
    return min(whole, max(smallest, wanted))


def _threads(measured: Measured) -> tuple[int, str]:
    sweep = measured.thread_time_s
    if not sweep:
        return THREADS, f"p = {THREADS} writers per snapshot: not measured, the middle of the usual 2 to 4."
    best = min(sweep, key=lambda count: (sweep[count], count))
    return (
        best,
        f"p = {best} writers per snapshot: measured, one snapshot takes {sweep[best]:.3g} s with them.",
    )


# ------------------------------------------------------------------ f
def runtime_s(
    steps: int, interval: int, in_flight: int, step_s: float, write_s: float, slowdown: float = 1.0
) -> float:
    """runtime_2 of section 3.4, the left side of eq. (1): seconds that `steps` [A] take with snapshots.

    f t + max(T_w, N f t) (A / (f N) - 1) + T_w; with `in_flight` = 1 it is runtime_1.
    `slowdown` makes the t in it that of a step while persisting; 1, as in the paper, changes nothing.
    """
    group = max(write_s, in_flight * interval * step_s * slowdown)
    return interval * step_s + group * (steps / (interval * in_flight) - 1) + write_s


def interval_by_paper(measured: Measured, in_flight: int, overhead: float) -> int:
    """f* = ceil(T_w / (N* q t)), eq. (3), steps, at least 1.

    From eq. (2), T_w A / (f N) <= q A t, that is eq. (1) without its f t, which a long training outweighs.
    """
    bound = write_time(measured, in_flight) / (in_flight * overhead * measured.step_s)
    return max(1, math.ceil(bound))


def interval_within(measured: Measured, in_flight: int, overhead: float) -> int:
    """The smallest f, steps, at which the time of training grows by no more than `overhead` [q].

    Eq. (2) is right for stalls: there a step takes T_w / (N f) > t, so it bounds that by q t.  But at its f
    writing never pauses, and each step then takes at least s t (s = slowdown_while_persisting): for q < s
    it promises what it cannot hold, the less so the smaller q - 1.  Let W be the time per interval in which
    something is written.  In W only W / s of training is done, so an interval takes f t + W (1 - 1/s), and
        f t + W (1 - 1/s) <= q f t   <=>   f >= W (1 - 1/s) / ((q - 1) t).
    W = T_w(1), as q < s implies q f t >= T_w(1) (1 - 1/s) q / (q - 1) >= T_w(1): they are too far apart to
    overlap.  So: eq. (3), and for q < s the larger of both.  For s = 1 this is eq. (3).
    """
    stalls = interval_by_paper(measured, in_flight, overhead)
    s = measured.slowdown_while_persisting
    if overhead >= s:
        return stalls
    taken = write_time(measured, 1) * (1 - 1 / s)
    return max(stalls, math.ceil(taken / ((overhead - 1) * measured.step_s)))


def expected_overhead(measured: Measured, in_flight: int, interval: int) -> float:
    """Training time with snapshots over that without, by the model of `interval_within`; 1 or more.

    max(T_w / (N f t), min(s, 1 + T_w(1) (1 - 1/s) / (f t))): stalled, or slowed while something is written.
    """
    s = measured.slowdown_while_persisting
    steps_s = interval * measured.step_s
    stalled = write_time(measured, in_flight) / (in_flight * steps_s)
    return max(stalled, min(s, 1 + write_time(measured, 1) * (1 - 1 / s) / steps_s))


# ------------------------------------------------------------------ recovery
def longest_recovery_s(interval: int, in_flight: int, step_s: float, write_s: float, load_s: float) -> float:
    """The upper bound of eq. (4), seconds: l + f t + t min(N f, T_w / t).

    Below it the paper writes "if T_w < N"; T_w < N f t is meant.  Its lower bound 0 leaves out that `load_s`
    [l] is always spent.
    """
    return load_s + interval * step_s + step_s * min(in_flight * interval, write_s / step_s)


def longest_loss_s(choice: Choice, measured: Measured, load_s: float) -> float:
    """Eq. (4) for a choice: at most so many seconds of loading and of training again, at `step_s` a step."""
    if not 0 <= load_s < math.inf:
        raise CannotTune(f"a load time of {load_s} s: write seconds, 0 or more")
    write_s = write_time(measured, choice.in_flight)
    return longest_recovery_s(choice.interval, choice.in_flight, measured.step_s, write_s, load_s)


# ------------------------------------------------------------------ words
def explain(choice: Choice, measured: Measured, limits: Limits) -> str:
    """The choice for a person: several lines, with units, reasons and what a recovery would cost."""
    overhead = expected_overhead(measured, choice.in_flight, choice.interval)
    apart = choice.interval * measured.step_s * overhead
    lost = longest_loss_s(choice, measured, 0)
    reload_s = measured.state_bytes / measured.device_to_host_bytes_s
    room = (choice.in_flight + 1) * measured.state_bytes
    lines = [
        f"a snapshot of {size(measured.state_bytes)} every {choice.interval} steps (about {apart:.3g} s), "
        f"up to {choice.in_flight} under way at once",
        *(f"  {sentence}" for sentence in choice.explained),
        f"  Expected: training takes {overhead:.4g} times as long (allowed {limits.overhead:.4g}); "
        f"{size(room)} of {size(limits.storage_bytes)} storage are used.",
        f"  A recovery loads {size(measured.state_bytes)}, at least {reload_s:.3g} s at the device's rate, "
        f"more where the storage reads slower, then trains at most {lost:.3g} s again (eq. 4).",
    ]
    return "\n".join(lines)


def _why_in_flight(measured: Measured, limits: Limits, count: int, most: int) -> str:
    taken = write_time(measured, count)
    origin = "measured" if count in measured.write_time_s else "estimated, rather too long"
    more = f"{size(limits.storage_bytes)} of storage allow {most}"
    return (
        f"N* = {count}: the storage then finishes a snapshot every {taken / count:.3g} s, "
        f"each takes {taken:.3g} s ({origin}), and no other N does better; {more}."
    )


def _why_chunks(measured: Measured, limits: Limits, chunk: int, chunks: int) -> str:
    saturating = measured.device_to_host_bytes_s * CHUNK_S
    reason = f"{1000 * CHUNK_S:.0f} ms of the device's {size(measured.device_to_host_bytes_s)}/s"
    if chunk >= measured.state_bytes:
        reason = "the whole snapshot"
    elif chunk < saturating - ALIGNMENT:
        reason = f"less than would saturate the device ({size(saturating)}), as memory is short"
    return (
        f"b = {size(chunk)} a chunk ({reason}), c = {chunks} of them in {size(limits.dram_bytes)} of memory."
    )


def _why_interval(measured: Measured, limits: Limits, count: int, interval: int) -> str:
    q, s = limits.overhead, measured.slowdown_while_persisting
    stalls = interval_by_paper(measured, count, q)
    if interval == 1:
        return "f* = 1 step: even a snapshot after every step stays within the allowed overhead."
    if interval == stalls:
        return (
            f"f* = {interval} steps: with fewer, training would wait for the storage "
            f"more than {100 * (q - 1):.3g} % of the time (eq. 3)."
        )
    return (
        f"f* = {interval} steps: steps take {100 * (s - 1):.3g} % longer while a snapshot is written, "
        f"so writing must pause to stay within {100 * (q - 1):.3g} %; one is under way at a time, then. "
        f"Waiting for the storage alone (eq. 3) would allow {stalls}."
    )


def size(count: float) -> str:
    """`16.2 GB`; decimal, as storage is sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _positive(value: float, name: str) -> None:
    if not 0 < value < math.inf:
        raise CannotTune(f"{name} is {value}: it must be more than 0")
