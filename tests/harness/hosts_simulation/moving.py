"""A worker that is sent to and fro between three hosts whose proxyds die, by the real protocol of moves."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from simulation.programs import mix
from simulation.virtual_time import Stalled

from hosts_simulation.lives import LIFE, HostsLoop, Life, run
from hosts_simulation.network import Network, Server
from hosts_simulation.outcome import Outcome
from hosts_simulation.workers import Conversation, Copy, Machine, Process, Relay, in_model
from understudy.protos import control_pb2 as pb
from understudy.recovery.base import background
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.migration.incoming import incoming_worker
from understudy.recovery.migration.relay import outgoing_workers
from understudy.recovery.migration.relay.orders import OrderRefused
from understudy.recovery.migration.transfer import dumping, moves, shipping
from understudy.recovery.migration.transfer.dumping import DumpedWorker
from understudy.recovery.migration.transfer.header import VERSION, Here, Refusal
from understudy.recovery.migration.transfer.moves import Moves
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.shipping import send_worker
from understudy.recovery.migration.worker_state import Away, WorkerState

HOSTS = ("a", "b", "c")
WORKER_PID = 77
ROUGH_S = 900.0
QUIET_S = 4800.0
"""Longer than anybody's patience."""
RUNTIMES = {
    name: SHARED_MEMORY / f"understudy-{os.getuid()}-{number}-1-x" for number, name in enumerate(HOSTS, 1)
}


class World:
    """Everything of one schedule."""

    def __init__(self, seed: int, loop: HostsLoop) -> None:
        self.seed, self.loop = seed, loop
        self.chance, self.kills = random.Random(mix(seed, 31)), random.Random(mix(seed, 37))
        self.patience = random.Random(mix(seed, 38))
        self.outcome = Outcome()
        self.network = Network(loop, self.chance, self.violation)
        self.machines = {name: Machine(self, name) for name in HOSTS}
        self.obeying: Relay | None = None
        self.images: dict[str, int] = {}
        self.done = 0
        """What the worker has done by now, wherever it did it."""
        self.troubled = True
        self._numbers = iter(range(1, 1 << 30))
        self._proxyds: dict[str, Proxyd] = {}
        self.home = self.chance.choice(HOSTS)
        self.relay = RUNTIMES[self.home] / "r.00000001" / "r0"

    # ------------------------------------------------------------------ what must hold
    def violation(self, text: str) -> None:
        """Remember what must not have happened."""
        if not self.loop.over:
            self.outcome.violations.append(f"{text}, at {self.loop.time():.3f} s")

    def note(self, text: str) -> None:
        """For whoever explains a seed."""
        self.outcome.told.append(f"{self.loop.time():10.4f} {text}")

    def count(self, what: str) -> None:
        self.outcome.counts[what] += 1

    def copies(self) -> list[Copy]:
        """That are there in any state."""
        relays = [relay for machine in self.machines.values() for relay in machine.relays.values()]
        return [one.copy for one in relays if one.copy is not None and one.copy.state != "absent"]

    def runs(self, copy: Copy) -> None:
        """At any time one copy runs, and it is the one that has done all that was done."""
        others = [one for one in self.copies() if one is not copy and one.state == "running"]
        self.note(f"{copy} runs, having done {copy.done} of {self.done}")
        if others:
            self.violation(f"{copy} is let run beside {others[0]}")
        if copy.done != self.done:
            self.violation(f"{copy} is let run, which has not done what another one has")

    @contextmanager
    def acting(self, relay: Relay) -> Iterator[None]:
        """It is the one that obeys."""
        self.obeying = relay
        try:
            yield
        finally:
            self.obeying = None

    def patience_s(self) -> float:
        """How long a worker that is sent stands still: mostly long enough."""
        return self.patience.choice((2.5, 120.0, 120.0))

    def number(self) -> int:
        """Another one."""
        return next(self._numbers)

    def fails(self, what: str) -> bool:
        """By itself."""
        return self.troubled and self.chance.random() < 0.05

    # ------------------------------------------------------------------ the schedule
    async def run(self) -> None:
        """Rough, then quiet, then a look at what is left."""
        for name in HOSTS:
            await self._start(name)
        relay = self.machines[self.home].start_relay(self.relay, WorkerState.RUNNING)
        relay.copy = Copy(self, self.home, 0)
        relay.copy.run()
        await asyncio.gather(self._operate(), self._disturb(), self._kill_relays())
        self.troubled = self.network.rough = False
        self.network.heal_all()
        for name in HOSTS:
            self._proxyds[name].life.steps_left = -1
            if not self._proxyds[name].life.alive:
                await self._start(name)
        await asyncio.sleep(QUIET_S)
        self._judge(relay)

    async def _start(self, name: str) -> None:
        self.note(f"{name}: a proxyd starts")
        proxyd = Proxyd(self, name)
        self._proxyds[name] = proxyd
        await proxyd.start()

    def host_of_worker(self) -> str:
        """Where its proxyd would say that it runs."""
        for name, machine in self.machines.items():
            relay = machine.relays.get(self.relay)
            if relay is not None and relay.where.state is WorkerState.RUNNING:
                return name
        return self.chance.choice(HOSTS)

    async def _operate(self) -> None:
        while self.loop.time() < ROUGH_S:
            await asyncio.sleep(self.chance.expovariate(1 / 60))
            source = self.host_of_worker()
            destination = self.chance.choice([name for name in HOSTS if name != source])
            if self.chance.random() < 0.5:
                victim = self._proxyds[self.chance.choice((source, destination, self.home))].life
                victim.steps_left = self.chance.randint(1, 250)
            self._proxyds[source].send(destination)

    async def _disturb(self) -> None:
        while self.loop.time() < ROUGH_S:
            await asyncio.sleep(self.chance.expovariate(1 / 25))
            one, other = self.chance.sample(HOSTS, 2)
            match self.chance.choice(("cut", "heal", "heal", "die", "end")):
                case "cut":
                    self.count("cuts")
                    self.note(f"{one}-{other} is cut")
                    self.network.cut(one, other)
                case "heal":
                    self.network.heal(one, other)
                case "die":
                    self._proxyds[one].life.die()
                case "end" if self.chance.random() < 0.05:
                    relay = self.machines[one].relays.get(self.relay)
                    if relay is not None and relay.copy is not None and relay.copy.state == "running":
                        self.note(f"the worker ends on {one}")
                        relay.worker_ends(3)

    async def _kill_relays(self) -> None:
        """In some schedules, by draws of their own: the others are as they would be without."""
        if self.kills.random() > 0.3:
            return
        while self.loop.time() < ROUGH_S:
            await asyncio.sleep(self.kills.expovariate(1 / 150))
            machine = self.machines[self.kills.choice(HOSTS)]
            relay = machine.relays.get(self.relay)
            if relay is not None and (machine.name != self.home or self.kills.random() < 0.2):
                self.count("relays killed")
                self.note(f"{machine.name}: its relay is killed, {relay.where.state}")
                machine.kill(relay.pid)

    def died(self, proxyd: Proxyd) -> None:
        """And another one starts after a while."""
        self.count("deaths")
        self.note(f"{proxyd.host}: proxyd has died")
        self.machines[proxyd.host].proxyd_died(proxyd.life)
        self.network.died(proxyd.life)

        def again() -> None:
            if self._proxyds[proxyd.host] is proxyd:
                self.loop.create_task(self._start(proxyd.host))

        if self.troubled:
            self.loop.outside(self.chance.choice((0.2, 5.0, 60.0, 250.0)), again)

    def _judge(self, relay: Relay) -> None:
        """Nobody disturbs any more."""
        running = [one for one in self.copies() if one.state == "running"]
        over = relay.ended
        if over and self.copies():
            self.violation(f"{self.copies()[0]} is left behind, {self.copies()[0].state}")
        elif not over and (len(running) != 1 or len(self.copies()) != 1):
            states = [f"{one} is {one.state}" for one in self.copies()]
            self.violation(f"nothing goes on: {', '.join(states) or 'there is no copy'}")
        for name, machine in self.machines.items():
            here = machine.relays.get(self.relay)
            if name != self.home and here is not None and (over or here.copy not in running):
                self.violation(f"a relay is left behind on {name}")
            known = self._proxyds[name].moves.incoming.get(str(self.relay))
            if here is not None and known is not None and known.state != here.where.state:
                self.violation(f"host {name} takes a worker that is {here.where.state} for {known.state}")
            if name != self.home and here is None and machine.made:
                self.violation(f"directories are left behind on {name}")
        if over:
            self.count("ended")


class Proxyd:
    """One of them: as much of it as moves workers."""

    moves: Moves

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.life = Life(world.loop, host)
        self.life.on_death.append(lambda: world.died(self))
        self._machine = world.machines[host]

    async def start(self) -> None:
        """As a successor of the one before."""
        self.life.start(self._live())

    async def _live(self) -> None:
        here = SimpleNamespace(
            host=self.host, machine=SimpleNamespace(kernel="k", features=()), torch_version="t",
            criu=SimpleNamespace(path=Path("/criu"), version_text="4.1.1"),
        )  # fmt: skip
        self.moves = Moves(
            cast(Here, here),
            RUNTIMES[self.host],
            partial(self.world.network.channel, self.host),
            images=Path("/tmp"),
        )
        directories = Directories(self._machine, RUNTIMES[self.host])
        self.moves.__dict__.update(_records=Records(self._machine), _directories=directories)
        await self.moves.resume()
        server = Server()
        self.moves.add_to(server)
        self.world.network.servers[self.host] = self.life, server

    def send(self, destination: str) -> None:
        """As an order of the leader has it, if there is a session for it here."""
        if not self.life.alive or not hasattr(self, "moves"):
            return
        if self.host == self.world.home or str(self.world.relay) in self.moves.incoming:
            self.life.start(self._send(destination))

    async def _send(self, destination: str) -> None:
        directory = RUNTIMES[self.world.home] / "job" / f"rank-0-{self.world.number()}"
        worker = DumpedWorker("job", 0, 1, directory, self.world.relay, WORKER_PID)
        self.world.note(f"{self.host}: to send the worker to {destination}")
        try:
            await send_worker(self.moves, worker, destination, self.world.patience_s())
        except NotSent as problem:
            self.world.count("refused")
            self.world.note(f"{self.host}: {problem}")
        else:
            self.world.count("moved")
            self.world.note(f"{self.host}: it was sent")


class Records:
    """As IncomingRecords, in a machine's memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def write(self, record: Any) -> None:
        self._machine.records[record.header.move] = record.SerializeToString()

    def remove(self, move: str) -> None:
        self._machine.records.pop(move, None)

    def read(self) -> list[Any]:
        return [pb.IncomingRecord.FromString(data) for _, data in sorted(self._machine.records.items())]


class Directories:
    """As IncomingDirectories: those of other hosts' proxyds, and how many use them."""

    def __init__(self, machine: Machine, own: Path) -> None:
        self._machine, self._own = machine, own
        self._users: dict[Path, int] = {}

    def enter(self, path: Path) -> None:
        if path == self._own:
            return
        if path not in self._users:
            if path in self._machine.made:
                raise Refusal(f"{path} cannot be made: it exists")
            self._machine.made.add(path)
        self._users[path] = self._users.get(path, 0) + 1

    def take_over(self, path: Path) -> None:
        if path not in self._machine.made:
            raise FileNotFoundError(2, str(path))
        self._users[path] = self._users.get(path, 0) + 1

    def remove_abandoned(self) -> None:
        self._machine.made &= self._users.keys()

    def leave(self, path: Path) -> None:
        if path in self._users:
            self._users[path] -= 1
            if not self._users[path]:
                del self._users[path]
                self._machine.made.discard(path)


class Delivery:
    """As the real one, without files."""

    def __init__(self, header: Any, found: Any, images: Path, at_home: bool) -> None:
        self.header, self.places, self.images, self.at_home = header, found, images, at_home
        self.complete = False

    def begin(self) -> None: ...

    def take(self, part: Any) -> None:
        self.complete = part.WhichOneof("part") == "end"

    def drop_images(self) -> None: ...

    def take_over(self) -> None: ...

    def discard(self) -> None: ...


class OutgoingInMemory(outgoing_workers.OutgoingWorkers):
    """What is written down of workers that are away is in the machine's memory."""

    def _machine(self) -> Machine:
        life = LIFE.get()
        assert life is not None
        return Process.world.machines[life.host]

    def resume(self) -> None:
        for path, text in self._machine().away.items():
            self.follow(path, Away(**json.loads(text)))

    def note(self, relay: Path, away: Away) -> None:
        if relay not in self._machine().relays:
            raise FileNotFoundError(2, f"{relay} is not there")
        self._machine().away[relay] = json.dumps(asdict(away))

    def forget(self, relay: Path) -> None:
        self._machine().away.pop(relay, None)


def _here(world: World) -> Machine:
    life = LIFE.get()
    assert life is not None
    return world.machines[life.host]


@contextmanager
def in_world(world: World) -> Iterator[None]:
    """The real modules, with machines and time of the simulated world."""
    chance = world.chance

    async def to_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(chance.uniform(0.0, 0.003))
        return function(*arguments, **named)

    async def order(path: Path, what: str, **more: Any) -> dict[str, Any]:
        relay = _here(world).relays.get(path)
        if relay is None:
            await asyncio.sleep(chance.uniform(0.0, 0.003))
            nobody = FileNotFoundError(2, "no relay")
            raise OrderRefused(f"the relay in {path} does not answer as it should") from nobody
        return await relay.order(what, more)

    async def connect(path: Path) -> tuple[Conversation, Conversation]:
        await asyncio.sleep(chance.uniform(0.0, 0.003))
        relay = _here(world).relays.get(path)
        if relay is None:
            raise FileNotFoundError(2, "no relay")
        if relay.home is not None:
            relay.home.close()
        relay.home = Conversation(relay)
        return relay.home, relay.home

    async def start_far_relay(incoming: Any) -> None:
        machine = _here(world)
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        relay = machine.start_relay(incoming.places.relay, WorkerState.REMOTE)
        vars(incoming)["_far"] = far = Process(relay.pid)
        stdin = SimpleNamespace(write=lambda line: vars(relay).update(stays=True))
        vars(incoming)["_process"] = SimpleNamespace(stdin=stdin, wait=far.ended.wait, pid=relay.pid)
        await asyncio.sleep(chance.uniform(0.0, 0.05))

    def account(incoming: Any) -> tuple[int, str] | None:
        return _here(world).accounts.get(incoming.places.relay)

    def header(sending: Any) -> Any:
        who, incoming, moves_ = sending.worker, sending.incoming, sending.moves
        return pb.WorkerHeader(
            version=VERSION, move=sending.move, job=who.job, rank=who.rank, world=who.world,
            directory=str(who.directory), relay=str(who.relay), worker=WORKER_PID, pids=[WORKER_PID],
            home=incoming.header.home if incoming is not None else moves_.here.host,
        )  # fmt: skip

    def pack(sending: Any, dumped: dict[str, Any]) -> tuple[Any, list[Any]]:
        found = header(sending)
        copy = _here(world).relays[world.relay].copy
        found.working_directory = str(copy.done if copy is not None else -1)
        return found, []

    async def parts(found: Any) -> Any:
        for part in found:
            yield part

    def some_parts(found: Any, _: Any) -> list[Any]:
        data = pb.WorkerPart(data=pb.WorkerData(data=b"x"))
        return [pb.WorkerPart(header=found), data, data, pb.WorkerPart(end=pb.WorkerEnd())]

    def images_folder(receiver: Any, wanted: int) -> Path:
        return Path(f"/arriving/{world.number()}")

    def begin(delivery: Delivery) -> None:
        world.images[str(delivery.images)] = int(delivery.header.working_directory)

    async def nothing(*_: Any, **__: Any) -> list[str]:
        return []

    outputs = SimpleNamespace(read=lambda _: None, let_go=lambda *_: None, close=lambda: None)
    log = SimpleNamespace(
        **dict.fromkeys(("debug", "info", "warning"), lambda *_, **__: None),
        error=lambda text, **more: _complain(world, text, more),
    )
    disk = SimpleNamespace(rmtree=lambda *_: None, disk_usage=lambda _: SimpleNamespace(free=1 << 40))
    tokens = SimpleNamespace(token_hex=lambda _: f"{chance.getrandbits(128):032x}")
    with ExitStack() as stack:
        stack.enter_context(in_model(world))
        patches: list[tuple[Any, dict[str, Any]]] = [
            (asyncio, {"to_thread": to_thread}),
            (background, {"log": log}),
            (outgoing_workers, {"order": order, "_connect": connect, "_positions": lambda _: [], "log": log}),
            (incoming_worker, {
                "order": order, "Watched": Process, "pid_here": lambda pid, _: WORKER_PID + (1 << 23),
                "Outputs": lambda *_: outputs}),
            (moves, {"order": order, "check_fit": lambda *_: None, "Delivery": Delivery, "log": log,
                     "OutgoingWorkers": OutgoingInMemory, "remove_unfinished": lambda _: None}),
            (dumping, {"order": order, "lasting_obstacles": nothing, "trouble_of_machine": lambda _: "",
                       "memory_of": lambda _: 0, "place_for": lambda *_: Path("/tmp"), "log": log,
                       "shutil": disk}),
            (shipping, {"order": order, "secrets": tokens, "parts": some_parts, "read_ahead": parts,
                        "log": log, "shutil": disk}),
        ]  # fmt: skip
        for where, what in patches:
            stack.enter_context(patch.multiple(where, **what))
        stack.enter_context(patch.object(incoming_worker.IncomingWorker, "_start_far_relay", start_far_relay))
        stack.enter_context(patch.object(incoming_worker.IncomingWorker, "_account", account))
        stack.enter_context(patch.object(Delivery, "begin", begin))
        stack.enter_context(patch.object(Moves, "_images_folder", images_folder))
        stack.enter_context(patch.object(Moves, "_supervise", lambda *_: None))
        stack.enter_context(patch.object(dumping.Dumping, "header", header))
        stack.enter_context(patch.object(shipping._Sending, "_pack", pack))
        yield


def _complain(world: World, text: str, more: dict[str, Any]) -> None:
    world.note(f"{text}: {more}")
    if "exc_info" in more:
        world.violation(f"{text}: {more['exc_info']!r}")


def simulate(seed: int) -> Outcome:
    """One seed."""
    loop = HostsLoop()
    world = World(seed, loop)
    with in_world(world):
        try:
            run(world.run(), loop)
        except Stalled as problem:
            world.outcome.violations.append(str(problem))
    return world.outcome
