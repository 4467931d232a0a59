"""What device servers tell each other to build communicators goes with its generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import made_up_ranks
import proxied
import pytest

from understudy.protos import control_pb2 as pb
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.placement import HostPlacement
from understudy.recovery.job.coordinator import Coordinator
from understudy.recovery.job.recovery_round import Result
from understudy.recovery.planning.facts import FaultFacts
from understudy.recovery.planning.planner import Plan, PlanName
from understudy.recovery.rendezvous import services
from understudy.recovery.rendezvous.services import StoreAnswers
from understudy.recovery.rendezvous.store import Notes, Store
from understudy.recovery.state.jobs import Job, Session

GENERATIONS = 300
KEYS = 8
"""Of one rank's communicators."""


class Rebuilding:
    """A coordinator whose rounds do nothing but rebuild communicators, of all ranks or some."""

    def __init__(self, store: Store, job: Job) -> None:
        self.job, self._answers = job, StoreAnswers(store)
        pool = cast(Any, SimpleNamespace(fill=lambda: None))
        placement = HostPlacement(pool, Leases([session.device for session in job.sessions.values()], pool))
        forget = partial(store.forget_generations, job.name)
        self._coordinator = Coordinator(job, placement, True, lambda _: None, forget=forget)
        vars(self._coordinator)["_round"] = SimpleNamespace(run=self._run, concerned=self._concerned)
        self._ranks: tuple[int, ...] = ()

    async def rebuild(self, *ranks: int) -> None:
        self._ranks = ranks
        await self._coordinator._attempt(1)

    def _concerned(self, _: object) -> tuple[list[Session], tuple[int, ...]]:
        return [self.job.sessions[rank] for rank in self._ranks], ()

    async def _run(self, fault: FaultFacts, tried: list[str]) -> Result:
        for rank in self._ranks:
            self.job.sessions[rank].generation = self.job.generation
            for number in range(KEYS):
                key = f"{self.job.name}/{self.job.generation}/uid/{rank}.{number}"
                await self._answers.set(pb.StoreSetRequest(key=key, value=b"address"))
        return Result(Plan(PlanName.REWIND_IN_PLACE, "", ()))


def in_a_loop(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene()

    asyncio.run(run())


def test_a_job_may_be_rebuilt_more_often_than_the_store_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each validation takes a generation, so a long job comes to any number of them."""
    monkeypatch.setattr(services, "MOST_KEYS", 3 * 2 * KEYS)

    async def scene() -> None:
        store = Store()
        rebuilding = Rebuilding(store, made_up_ranks.a_job(2))
        for _ in range(GENERATIONS):
            await rebuilding.rebuild(0, 1)
        assert rebuilding.job.generation == GENERATIONS
        assert len(store) <= 2 * 2 * KEYS, "this generation and the one before"

    in_a_loop(scene)


def test_communicators_that_a_round_does_not_concern_keep_what_they_were_built_with() -> None:
    async def scene() -> None:
        store = Store()
        rebuilding = Rebuilding(store, made_up_ranks.a_job(3))
        await rebuilding.rebuild(0, 1, 2)
        for _ in range(5):
            await rebuilding.rebuild(0, 1)
        assert store.holds([f"made-up/1/uid/2.{number}" for number in range(KEYS)])
        await rebuilding.rebuild(0, 1, 2)
        await rebuilding.rebuild(0, 1, 2)
        assert not store.holds(["made-up/1/uid/2.0"])

    in_a_loop(scene)


def test_only_communicators_of_that_job_grow_old() -> None:
    async def scene() -> None:
        store = Store()
        stay = [
            "made-up/7/uid/x",
            "made-up/8/uid/x",
            "made-up/epoch",
            "made-up",
            "made-up-2/1/uid/x",
            "1/1/1",
        ]
        for key in [*stay, "made-up/0/uid/x", "made-up/6/uid/x"]:
            await store.set(key, b"1")
        store.forget_generations("made-up", 7)
        assert store.holds(stay) and len(store) == len(stay)

    in_a_loop(scene)


def test_that_a_member_is_there_is_withdrawn_when_its_rank_goes_back_and_grows_old() -> None:
    async def scene() -> None:
        store = Store()
        there = {"made-up/meet/uid/0": b"3 5", "made-up/meet/uid/1": b"2 6", "made-up/meet/other/0": b"3 7",
                 "made-up/meet/uid/2": b"nonsense", "made-up/meet/uid/3": b"9" * 5000,
                 "made-up-2/meet/uid/0": b"1 5"}  # fmt: skip
        for key, value in there.items():
            await store.set(key, value)
        store.forget_generations("made-up", 3, [5])
        assert not store.holds(["made-up/meet/uid/0"]), "rank 5 went back"
        assert not store.holds(["made-up/meet/uid/1"]), "of generation 2"
        assert store.holds([*there][2:])

    in_a_loop(scene)


def test_what_is_forgotten_does_not_come_back_with_another_proxyd(tmp_path: Path) -> None:
    async def scene() -> None:
        store = Store(Notes(tmp_path / "store"))
        for generation in range(4):
            await store.add(f"j/{generation}/uid/n", 1, f"request {generation}")
        store.forget_generations("j", 3)
        successor = Store(Notes(tmp_path / "store"))
        assert len(successor) == 1 and successor.holds(["j/3/uid/n"])
        assert successor.done("request 3") == 1 and successor.done("request 2") is None

    in_a_loop(scene)


RECOVERED = """
import json, os, pathlib, torch, torch.distributed as dist
dist.init_process_group('nccl')
rank = dist.get_rank()
torch.cuda.set_device(rank)
weight = torch.nn.Parameter(torch.zeros(4, device='cuda'))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(16):
    weight.grad = torch.full((4,), float(step + rank), device='cuda')
    dist.all_reduce(weight.grad)
    optimizer.step()
    weight.sum().item()
dist.barrier()
if rank == 0:
    (path,) = pathlib.Path(os.environ['UNDERSTUDY_SHARED_MEMORY']).glob('understudy-*/store')
    keys = [json.loads(line)[0].split('/')[1] for line in path.read_text().splitlines()]
    generations = sorted({int(key) for key in keys if key != 'meet'})
    print(f'generations {generations}\\n', end='')  # in one piece
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.drawn(3)
def test_a_job_that_recovers_again_and_again_keeps_two_generations_of_keys(tmp_path: Path) -> None:
    script = tmp_path / "recovered.py"
    script.write_text(RECOVERED)
    drills = [f"--drill=kill-server rank={step % 2} step={step} call=1" for step in (4, 7, 10, 13)]
    options = ("--validate-every", "0", *drills)
    ended = proxied.run(proxied.ranks(2, script), folder=tmp_path, options=options)
    assert ended.status == 0, ended.output[-3000:]
    (line,) = [line for line in ended.output.splitlines() if line.startswith("generations")]
    generations = json.loads(line.removeprefix("generations "))
    assert max(generations) >= 4, "each recovery takes one"
    assert len(generations) <= 2, generations
