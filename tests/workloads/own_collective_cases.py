"""Process groups by our own calls of NCCL on a simulated CUDA device, each case by its name on the command
line; prints what came of it.

With SIMULATED_CUDA_LIBRARY in the environment, which names it. Ranks are forks that have met nobody yet.
"""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import simulated_device

simulated_device.load()

import torch  # noqa: E402 - it looks for devices when it is imported
import torch.distributed as dist  # noqa: E402
from torch.distributed import ProcessGroup as Group  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402

from understudy import replay  # noqa: E402
from understudy.proxy_server import _server  # noqa: E402

torch.cuda._lazy_init = lambda: None  # asks for a CUDA build
GPU = "cuda:0"
WAIT_MS = 60_000
SOON_S = 10.0
"""At once, on a machine that is busy with much else; what does not come by itself waits far longer."""
TOLD = Path(os.environ["SIMULATED_NCCL_TOLD"])
TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip


def group_of(folder: str, rank: int, size: int, wait_ms: int = WAIT_MS) -> Group:
    return _server.own_collectives(dist.FileStore(f"{folder}/store", size), rank, size, wait_ms)


def as_ranks(size: int, work: Callable[[Group, int], None]) -> list[int]:
    """Forks so many, each of which does that; answers their statuses. Output must be flushed."""
    sys.stdout.flush()
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="understudy-test-") as folder:
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    replay.die_with_parent(parent)
                    work(group_of(folder, rank, size), rank)
                    status = 0
                except Exception as error:  # noqa: BLE001 - a fork must not return
                    sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            children.append(pid)
        statuses = dict.fromkeys(children, 0)
        for _ in children:
            pid, status = os.wait()
            statuses[pid] = os.waitstatus_to_exitcode(status)
            if status != 0:  # the others would wait for it
                for other in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
        return list(statuses.values())


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def ours(rank: int, count: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank has; sums of few ranks are exact in every type."""
    return torch.arange(count, dtype=torch.float64).add(rank + 1).remainder(7).to(kind)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.cpu(), expected), (found.cpu(), expected)


def mean(all_: torch.Tensor) -> torch.Tensor:
    """As NCCL's, that of integers is rounded towards zero."""
    return all_.sum(0).div(len(all_), rounding_mode=None if all_.is_floating_point() else "trunc")


def _reductions(group: Group, rank: int, size: int) -> None:
    for kind in TYPES:
        all_ = [ours(one, 5, kind) for one in range(size)]
        for op, of in (
            (ReduceOp.SUM, lambda x: x.sum(0)), (ReduceOp.PRODUCT, lambda x: x.prod(0)),
            (ReduceOp.MIN, lambda x: x.amin(0)), (ReduceOp.MAX, lambda x: x.amax(0)), (ReduceOp.AVG, mean),
        ):  # fmt: skip
            expected = of(torch.stack(all_)).to(kind)
            x = all_[rank].to(GPU)
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group.allreduce([x], options).wait()
            same(x, expected)
        x = all_[rank].to(GPU)
        options = dist.ReduceOptions()
        options.rootRank = size - 1
        group.reduce([x], options).wait()
        same(x, torch.stack(all_).sum(0).to(kind) if rank == size - 1 else all_[rank])
    x = torch.tensor([rank == 0, False, True], device=GPU)
    group.allreduce([x]).wait()
    same(x, torch.tensor([True, False, True]))
    x = torch.full((3,), complex(rank, 1), device=GPU)
    group.allreduce([x]).wait()
    same(x, torch.full((3,), complex(sum(range(size)), size)))
    pair = [ours(rank, 3).to(GPU), ours(rank, 4, torch.int64).to(GPU)]
    group.allreduce_coalesced(pair).wait()
    for x, (count, kind) in zip(pair, ((3, torch.float32), (4, torch.int64)), strict=True):
        same(x, torch.stack([ours(one, count, kind) for one in range(size)]).sum(0))


def _gathering(group: Group, rank: int, size: int) -> None:
    for root in range(size):
        x = ours(rank, 6).to(GPU)
        options = dist.BroadcastOptions()
        options.rootRank = root
        group.broadcast([x], options).wait()
        same(x, ours(root, 6))
    for counts in ([4] * size, [one + 1 for one in range(size)]):
        parts = [torch.zeros(count, device=GPU) for count in counts]
        group.allgather([parts], [ours(rank, counts[rank]).to(GPU)]).wait()
        for one, part in enumerate(parts):
            same(part, ours(one, counts[one]))
        output = torch.zeros(counts[rank], device=GPU)
        group.reduce_scatter(
            [output], [[ours(rank + one, count).to(GPU) for one, count in enumerate(counts)]]
        ).wait()
        same(output, torch.stack([ours(one + rank, counts[rank]) for one in range(size)]).sum(0))
    whole = torch.zeros(4 * size, device=GPU)
    group._allgather_base(whole, ours(rank, 4).to(GPU)).wait()
    same(whole, torch.cat([ours(one, 4) for one in range(size)]))
    part = torch.zeros(4, device=GPU)
    group._reduce_scatter_base(part, whole).wait()
    same(part, ours(rank, 4) * size)
    for root in range(size):
        gathered = [[torch.zeros(3, device=GPU) for _ in range(size)]] if rank == root else []
        options = dist.GatherOptions()
        options.rootRank = root
        group.gather(gathered, [ours(rank, 3).to(GPU)], options).wait()
        for one, part in enumerate(gathered[0] if gathered else ()):
            same(part, ours(one, 3))
        parts = [[ours(10 + one, 3).to(GPU) for one in range(size)]] if rank == root else []
        output, scattering = torch.zeros(3, device=GPU), dist.ScatterOptions()
        scattering.rootRank = root
        group.scatter([output], parts, scattering).wait()
        same(output, ours(10 + rank, 3))


def _exchanging(group: Group, rank: int, size: int) -> None:
    outputs = [torch.zeros(2 + one + rank, device=GPU) for one in range(size)]
    group.alltoall(outputs, [ours(rank, 2 + one + rank).to(GPU) for one in range(size)]).wait()
    for one, output in enumerate(outputs):
        same(output, ours(one, 2 + one + rank))
    output = torch.zeros(2 * size, 3, device=GPU)
    group.alltoall_base(output, ours(rank, 6 * size).reshape(-1, 3).to(GPU), [], []).wait()
    same(
        output,
        torch.cat([ours(one, 6 * size)[6 * rank : 6 * rank + 6] for one in range(size)]).reshape(-1, 3),
    )
    to, come = [one for one in range(size)], [rank] * size  # nothing at all to rank 0
    output = torch.zeros(sum(come), 2, device=GPU)
    group.alltoall_base(output, ours(rank, 2 * sum(to)).reshape(-1, 2).to(GPU), come, to).wait()
    begin = 2 * sum(to[:rank])
    same(
        output,
        torch.cat([ours(one, 2 * sum(to))[begin : begin + 2 * rank] for one in range(size)]).reshape(-1, 2),
    )
    group.barrier().wait()
    left, right = (rank - 1) % size, (rank + 1) % size
    got = torch.zeros(5, device=GPU)
    for turn in range(size):  # one by one: each is a send and its receive
        if turn == rank:
            group.send([ours(rank, 5).to(GPU)], right, 0).wait()
        if (turn + 1) % size == rank:
            group.recv([got], left, 0).wait()
    same(got, ours(left, 5))
    got.zero_()
    sent = ours(rank, 5).add(1).to(GPU)
    group._start_coalescing()
    group.send([sent], right, 0)
    group.recv([got], left, 0)
    group._end_coalescing().wait()
    same(got, ours(left, 5) + 1)


def _every_kind(size: int) -> None:
    def work(group: Group, rank: int) -> None:
        for check in (_reductions, _gathering, _exchanging):
            check(group, rank, size)

    print(as_ranks(size, work))


def every_kind_of_two() -> None:
    """Each collective has the result that it is to have."""
    _every_kind(2)


def every_kind_of_three() -> None:
    _every_kind(3)


def unanswered() -> None:
    """Nobody else comes to connect: whoever waits leaves at once when it is aborted."""
    with tempfile.TemporaryDirectory(prefix="understudy-test-") as folder:
        group, ended = group_of(folder, 0, 2), threading.Event()

        def wait() -> None:
            try:
                group.allreduce([torch.ones(1, device=GPU)])
            except RuntimeError as error:
                print(error)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        assert within(WAIT_MS / 1000, TOLD.exists)  # it connects
        print(ended.is_set())
        begin = time.monotonic()
        group.abort()
        returned = time.monotonic() - begin
        print(ended.wait(SOON_S), returned < SOON_S)


def never_ready() -> None:
    """Nobody else comes, for as long as one waits."""
    with tempfile.TemporaryDirectory(prefix="understudy-test-") as folder:
        try:
            group_of(folder, 0, 2, wait_ms=200).allreduce([torch.ones(1, device=GPU)])
        except RuntimeError as error:
            print(error)


def _after(group: Group, rank: int, ends: Callable[[], None]) -> None:
    """Rank 1 does not come to the second collective; `ends` is what rank 0 does about it."""
    x = torch.full((4,), 1.0 + rank, device=GPU)
    group.allreduce([x]).wait()
    same(x, torch.full((4,), 3.0))
    if rank == 1:
        time.sleep(1000)
    work = group.allreduce([x])
    assert not within(0.2, work.is_completed)
    ends()
    print(within(SOON_S, work.is_completed), work.exception() is None)
    work.wait()
    print(bool((x == 3).any().item()))  # what it leaves is no result
    sys.stdout.flush()
    os._exit(7)  # which ends rank 1, too


def aborted_amid_a_collective() -> None:
    """It ends, with garbage, and so does each later call, with an error."""

    def work(group: Group, rank: int) -> None:
        def ends() -> None:
            group.abort()
            try:
                group.barrier()
            except RuntimeError as error:
                print(error)

        _after(group, rank, ends)

    as_ranks(2, work)


def given_up_amid_a_collective() -> None:
    """A group that nobody has any more does what it was asked for; only then its communicator goes."""
    given_up, tell = os.pipe()

    def work(group: Group, rank: int) -> None:  # nobody else may have the group
        x = torch.full((4,), 1.0 + rank, device=GPU)
        group.allreduce([x]).wait()
        if rank == 1:
            os.read(given_up, 1)
        done = group.allreduce([x])
        del group
        gc.collect()
        if rank == 0:
            assert TOLD.read_text() == "begun\n" * 2
            os.write(tell, b"!")
        done.wait()
        same(x, torch.full((4,), 6.0))
        assert within(WAIT_MS / 1000, lambda: TOLD.read_text().count("destroyed") == 2), TOLD.read_text()

    print(as_ranks(2, work))


def given_up_behind_an_abort() -> None:
    """Its communicator goes as soon as nothing of it runs any more."""

    def work(group: Group, rank: int) -> None:
        x = torch.ones(4, device=GPU)
        group.allreduce([x]).wait()
        if rank == 1:
            time.sleep(1000)
        done = group.allreduce([x])
        group.abort()
        del group
        gc.collect()
        gone = within(SOON_S, lambda: "ed\n" in TOLD.read_text().replace("begun", ""))
        print(gone, done.is_completed() or within(SOON_S, done.is_completed))
        sys.stdout.flush()
        os._exit(7)  # which ends rank 1, too

    as_ranks(2, work)


def refused_calls() -> None:
    """An error is told; what comes behind it finds the group in order, or is told that it is not."""

    def work(group: Group, rank: int) -> None:
        for _ in range(2):
            try:
                group.allreduce([torch.ones(4, device=GPU)])
            except RuntimeError as error:
                if rank == 0:
                    print(error)
        group.abort()

    print(as_ranks(2, work))


def peer_gone() -> None:
    """NCCL tells of it, which ends the wait with its words."""

    def work(group: Group, rank: int) -> None:
        x = torch.ones(4, device=GPU)
        group.allreduce([x]).wait()
        x.cpu()
        if rank == 1:
            os._exit(0)
        lost = group.allreduce([x])
        print(within(SOON_S, lost.is_completed))
        try:
            raise lost.exception()
        except RuntimeError as error:
            print(error)
        group.abort()

    print(as_ranks(2, work))


def no_such_reduction() -> None:
    """In PyTorch's words."""

    def work(group: Group, rank: int) -> None:
        options = dist.AllreduceOptions()
        for op, kind in (
            (ReduceOp.BAND, torch.int32),
            (ReduceOp.AVG, torch.bool),
            (ReduceOp.SUM, torch.int16),
        ):
            options.reduceOp = op
            try:
                group.allreduce([torch.ones(2, dtype=kind, device=GPU)], options)
            except RuntimeError as error:
                if rank == 0:
                    print(error)
        x = torch.ones(1, device=GPU)
        group.allreduce([x]).wait()
        same(x, torch.full((1,), 2.0))  # it goes on

    print(as_ranks(2, work))


def version() -> None:
    """Of the library that is found, or what is wrong with it."""
    try:
        print(_server.nccl_version())
    except RuntimeError as error:
        print(error)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        every_kind_of_two, every_kind_of_three, unanswered, never_ready, aborted_amid_a_collective,
        given_up_amid_a_collective, given_up_behind_an_abort, refused_calls, peer_gone, no_such_reduction,
        version,
    )
}  # fmt: skip
if __name__ == "__main__":
    CASES[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # a thread may still wait
