"""What stands in for what in the real modules, while a job on several hosts is simulated."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hosts_simulation.lives import LIFE
from simulation.fabric import Violation
from simulation.programs import mix

from job_simulation.images import Outgoing, Reception
from job_simulation.processes import STARTED
from job_simulation.proxyd import Host
from job_simulation.world import HostsWorld
from understudy.recovery.agent import host_agent, job_controller
from understudy.recovery.agent_api.server import Pace
from understudy.recovery.base import background
from understudy.recovery.job import coordinator, recovery_round
from understudy.recovery.job_hosts import arrivals, leading_host, migration, spans
from understudy.recovery.machine import activity
from understudy.recovery.planning.progress import SECOND, Finding
from understudy.recovery.rendezvous.store import Store
from understudy.recovery.spanning.leader import cpu_images, steering
from understudy.recovery.spanning.member import deputy, member
from understudy.recovery.spanning.ranks import description, image_file, image_set, mirror
from understudy.recovery.state import journaled_job
from understudy.recovery.state.jobs import Session
from understudy.recovery.takeover import adoption, journaling
from understudy.recovery.upkeep import watch
from understudy.recovery.upkeep.snapshots import SnapshotKeeper
from understudy.recovery.upkeep.watch import Watch

BEAT_S, JOURNAL_S, WATCH_S, STILL_S = 0.05, 1.0, 0.1, 0.5
"""Somewhat longer than in production: for minutes nothing happens but that somebody looks whether it does."""
LONGEST_THREAD_S = 0.01


@contextmanager
def in_world(world: HostsWorld) -> Iterator[None]:
    """Processes, logs, journals and time are those of the world."""

    def host() -> Host:
        life = LIFE.get()
        assert life is not None
        return world.hosts[life.host]

    def watched(pid: int, started: int = 0) -> Any:
        return host().watched(pid, started)

    watched.of = watched  # type: ignore[attr-defined]
    watched.gone = adoption.Watched.gone  # type: ignore[attr-defined]

    class NoWatch:
        """Where nobody hangs but by a request that is not answered; and for what is not simulated."""

        def __init__(self, *_: Any) -> None:
            """Nothing is known of it."""

        async def run(self) -> None:
            """Nothing is looked at."""

        @staticmethod
        def pace(_: Any) -> Pace:
            return Pace()

    class Watching(Watch):
        """It ends nobody who stands still and has said why."""

        def _end(self, session: Session, finding: Finding) -> None:
            device = world.by_pid[session.server.pid]
            if device.account.fault is not None and not device.stall.stands:
                world._complain(f"rank {session.rank} has told of a fault, and is ended: {finding.evidence}")
            super()._end(session, finding)

    class NoStore:
        """No worker here asks for a store."""

        def __init__(self, *_: Any) -> None:
            self.store = Store()

        async def run(self) -> None:
            """Nobody asks."""

        def close(self) -> None:
            """Nothing is open."""

    def complaining(real: Any) -> Any:
        def error(text: str, **more: Any) -> None:
            real.error(text, **more)
            if isinstance(problem := more.get("exc_info"), BaseException) and not isinstance(
                problem, Violation
            ):
                world._complain(f"{text}: {problem!r}")

        return SimpleNamespace(debug=real.debug, info=real.info, warning=real.warning, error=error)

    quiet = SimpleNamespace(follow=lambda *_: 0, leave=lambda _: None, close=lambda: None)
    journal = SimpleNamespace(write=world.journal_written, touch=lambda _: None)

    def moves(*_: Any, outputs: Any = None, **__: Any) -> Any:
        outgoing = Outgoing(world)
        return SimpleNamespace(
            outgoing=outgoing, add_to=lambda _: None, callbacks=_[3], host_is_lost=outgoing.give_up
        )

    async def to_thread(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(LONGEST_THREAD_S * threads.random())
        return work(*arguments, **named)

    threads = random.Random(mix(world.seed, 46))

    patches: list[tuple[Any, dict[str, Any]]] = [
        (time, {"monotonic": world.loop.time, "monotonic_ns": world.loop.nanoseconds,
                "time": lambda: 1e9 + world.loop.time()}),
        (background, {"log": complaining(background.log)}),
        (coordinator, {"log": complaining(coordinator.log)}),
        (recovery_round, {"plan": world._observed_plan}),
        (host_agent, {"Watched": watched, "Watch": Watching if world.watches else NoWatch, "Survey": NoWatch,
                      "EarlyNotice": lambda: quiet,
                      "make_log": lambda directory, request, _: world.place(directory, request.rank)}),
        (spans, {"Moves": moves, "why_not": lambda *_: ""}),
        (migration, {"send_worker": world.carrier.send, "image_of": world.images.image_of}),
        (cpu_images, {"Reception": partial(Reception, world)}),
        (image_file, {"check_form": lambda header: None}),
        (image_set, {"check_form": lambda header: None}),
        (asyncio, {"to_thread": to_thread}),
        (arrivals, {"Watched": watched, "replay": world.pages}),
        (leading_host, {"Watched": watched, "replay": world.pages}),
        (journaling, {"journal": journal, "start_ticks": lambda _: STARTED, "LOOK_S": JOURNAL_S}),
        (watch, {"PAUSE_S": WATCH_S, "UNHEARD_NS": int(2.5 * STILL_S * SECOND)}),
        (activity, {"process_state": world.process_state}),
        (deputy, {"BEAT_S": BEAT_S, "STILL_S": STILL_S if world.watches else math.inf}),
        (steering, {"ORDERS_S": BEAT_S}),
        (journaled_job, {"Watched": watched}),
        (job_controller, {"WorkerStore": NoStore, "begin_persisting": lambda *_: None}),
        (adoption, {"Watched": watched, "replay": world.pages, "process_state": lambda _: None,
                    "last_touched": lambda _: time.time()}),
        (mirror, {"replay": world.pages}),
        (description, {"replay": world.pages}),
        (member, {"replay": world.pages}),
    ]  # fmt: skip
    with ExitStack() as stack:
        for where, what in patches:
            stack.enter_context(patch.multiple(where, **what))
        stack.enter_context(patch.object(SnapshotKeeper, "_enough_memory", lambda *_: True))
        stack.enter_context(patch.object(adoption.Successor, "_remove_strays", lambda *_: None))
        yield
