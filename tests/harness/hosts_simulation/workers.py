"""One worker's copies on all hosts, and the relays that watch them: processes, which outlive a proxyd.

The rules of a relay's init are the real ones (recovery/migration/relay/whereabouts.py); CRIU and signals are
not.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hosts_simulation.lives import LIFE, Life
from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.relay import whereabouts
from understudy.recovery.migration.relay.orders import OrderRefused, parse
from understudy.recovery.migration.relay.whereabouts import NotMoved, Whereabouts
from understudy.recovery.migration.worker_state import Event, WorkerState

if TYPE_CHECKING:
    from hosts_simulation.moving import World

WORKER = (1 << 22) - 1
"""Its pid in its namespace: one that no process of this machine has."""
DURATIONS_S: dict[str, float] = {Event.DUMP: 1.0, Event.RESTORE: 1.0, Event.REMOVE: 0.05}


class Copy:
    """Of the worker, on one host; what it has done is a number."""

    def __init__(self, world: World, where: str, done: int) -> None:
        self._world, self._where, self.done = world, where, done
        self.state = "stopped"

    def run(self) -> None:
        if self.state != "stopped":
            return
        self.state = "running"
        self._world.runs(self)
        self.done = self._world.done = self._world.done + 1

    def stop(self) -> None:
        self.state = "stopped"

    def end(self) -> None:
        self.state = "absent"

    def __str__(self) -> str:
        return f"the copy on host {self._where}"


class Process:
    """As recovery.machine.processes.Watched, of a process of a machine that this proxyd looks at."""

    def __init__(self, pid: int, started: int = 0) -> None:
        self.pid, self.start_ticks = pid, started
        self.ended = self.memory_gone = asyncio.Event()
        life = LIFE.get()
        assert life is not None
        self._machine = self.world.machines[life.host]
        self._machine.watch(self)

    world: World
    """Whose processes they are."""

    @classmethod
    def of(cls, pid: int, started: int) -> Process:
        return cls(pid, started)

    @property
    def running(self) -> bool:
        return self.pid in self._machine.processes

    def message(self) -> Any:
        return pb.Process(pid=self.pid, start_ticks=self.start_ticks)

    def send(self, number: signal.Signals) -> None:
        """Signals are not looked at."""

    def close(self) -> None: ...

    async def end(self, grace: float) -> None:
        self._machine.kill(self.pid)
        await self.ended.wait()


class Relay:
    """Process 1 of the worker's namespace on one host."""

    def __init__(self, machine: Machine, path: Path, pid: int, state: WorkerState) -> None:
        self.machine, self.path, self.pid = machine, path, pid
        self.where = Whereabouts(WORKER, state)
        self.copy: Copy | None = None
        self.status: int | None = None
        """Of the worker, once it is known."""
        self.problem = ""
        self.stays = state is WorkerState.RUNNING
        """Whether it lives on without the proxyd that started it."""
        self.owner: Life | None = LIFE.get()
        self.home: Conversation | None = None
        self._busy_until = 0.0

    @property
    def ended(self) -> bool:
        return self.machine.relays.get(self.path) is not self

    async def order(self, what: str, more: dict[str, Any]) -> dict[str, Any]:
        """Carried out also if nobody waits any more; raises OrderRefused."""
        world = self.machine.world
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        longest = DURATIONS_S.get(what, 0.002)
        begin = max(self._busy_until, world.loop.time() + world.chance.uniform(0.0001, 0.005))
        self._busy_until = begin + world.chance.uniform(longest / 2, longest)
        world.loop.outside(self._busy_until - world.loop.time(), self._obey, {"do": what, **more}, answer)
        done = await answer
        if "error" in done:
            raise OrderRefused(str(done["error"]))
        return done

    def _obey(self, order: dict[str, Any], answer: asyncio.Future[dict[str, Any]]) -> None:
        if self.ended:
            done: dict[str, Any] = {"error": f"the relay in {self.path} does not answer as it should"}
        else:
            with self.machine.world.acting(self):
                try:
                    done = self.where.obey(order) | {"namespace": 1}
                except (ValueError, OSError, NotMoved) as problem:
                    done = {"error": str(problem)}
            self._look_at_time()
        self.machine.world.note(f"{self.machine.name}: {order['do']}: {done.get('error', self.where.state)}")
        if not answer.done():
            answer.set_result(done)

    def _look_at_time(self) -> None:
        patience = self.where.patience()
        if patience is not None:
            self.machine.world.loop.outside(patience + 1e-6, self._out_of_patience)

    def _out_of_patience(self) -> None:
        if not self.ended and self.where.patience() == 0:
            with self.machine.world.acting(self):
                self.where.time_out()
            self.machine.world.note(f"{self.machine.name}: out of patience: {self.where.state}")

    def worker_ends(self, status: int) -> None:
        """The copy here has ended by itself."""
        assert self.copy is not None
        self.copy.end()
        self.where.end()
        if self.where.state is WorkerState.ENDED:
            self.tell_end(status, "")

    def tell_end(self, status: int, problem: str) -> None:
        """It is over, and so is the relay."""
        self.status, self.problem = status, problem
        self.machine.world.note(f"{self.machine.name}: its relay ends: {status} {problem}")
        self.machine.accounts[self.path] = status, problem
        self.machine.kill(self.pid)

    def hear(self, message: dict[str, Any]) -> None:
        """On the connection that stays."""
        if self.ended:
            return
        with self.machine.world.acting(self):
            over = "ended" in message and self.where.ended_remotely()
        if over:
            self.tell_end(int(message["ended"]), str(message.get("problem") or ""))


class Conversation:
    """The connection to a relay at home that stays: reader and writer in one."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._over = False

    async def readline(self) -> bytes:
        return b"" if self._over and self._lines.empty() else await self._lines.get()

    def write(self, line: bytes) -> None:
        message = parse(line)
        self._relay.machine.world.loop.outside(0.001, self._relay.hear, message)

    async def drain(self) -> None: ...

    def close(self) -> None:
        self._over = True
        self._lines.put_nowait(b"")


class Machine:
    """A host without its proxyd: processes, and what lies in its shared memory."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.relays: dict[Path, Relay] = {}
        self.processes: dict[int, Callable[[], None]] = {}
        """How each ends."""
        self.records: dict[str, bytes] = {}
        self.away: dict[Path, str] = {}
        self.accounts: dict[Path, tuple[int, str]] = {}
        self.made: set[Path] = set()
        """Directories that arriving workers need."""
        self._watched: list[Process] = []
        self._pid = 1000

    def start_relay(self, path: Path, state: WorkerState) -> Relay:
        self._pid += 1
        relay = Relay(self, path, self._pid, state)
        self.accounts.pop(path, None)
        self.relays[path] = relay
        self.processes[relay.pid] = lambda: self._relay_ended(relay)
        return relay

    def _relay_ended(self, relay: Relay) -> None:
        if self.relays.get(relay.path) is relay:
            del self.relays[relay.path]
            self.away.pop(relay.path, None)  # its launcher removes the directory
        if relay.copy is not None:
            relay.copy.end()
        if relay.home is not None:
            relay.home.close()

    def kill(self, pid: int) -> None:
        end = self.processes.pop(pid, None)
        if end is not None:
            end()
            for watched in self._watched:
                if watched.pid == pid:
                    self.world.loop.outside(0.0005, watched.ended.set)

    def watch(self, process: Process) -> None:
        self._watched = [one for one in self._watched if not one.ended.is_set()]
        self._watched.append(process)
        if process.pid not in self.processes and process.pid < WORKER:
            process.ended.set()

    def proxyd_died(self, life: Life) -> None:
        """Relays that it had started and that nobody has told to stay."""
        for relay in list(self.relays.values()):
            if relay.owner is life and not relay.stays:
                self.kill(relay.pid)


@contextmanager
def in_model(world: World) -> Iterator[None]:
    """Orders to a relay's init act on the model's copies."""

    def acting() -> Relay:
        assert world.obeying is not None
        return world.obeying

    def dump(*_: object) -> None:
        relay = acting()
        if world.fails("dump"):
            raise NotMoved("CRIU could not dump it")
        if relay.copy is None or relay.copy.state == "absent":
            raise NotMoved("there is no such process")
        relay.copy.stop()

    def restore(worker: int, criu: str, images: Path, *_: object) -> None:
        relay = acting()
        if world.fails("restore"):
            raise NotMoved("CRIU could not restore it")
        if relay.copy is not None and relay.copy.state != "absent":
            world.violation(f"a worker is restored beside {relay.copy}")
        relay.copy = Copy(world, relay.machine.name, world.images[str(images)])

    def send(pids: list[int], number: signal.Signals) -> None:
        copy = acting().copy
        if copy is not None and pids:
            copy.run() if number == signal.SIGCONT else copy.end()

    tree = SimpleNamespace(processes=[SimpleNamespace(pid=WORKER)])
    stand_ins: dict[str, Any] = {
        "dump": dump, "restore": restore, "_send": send, "await_end": lambda *_: None,
        "read_tree": lambda _: tree, "_is_stopped": lambda _: False, "shutil": SimpleNamespace(
            rmtree=lambda *_, **__: None), "images_folder": lambda _: Path("/dumped"),
        "LAST_PID": SimpleNamespace(write_text=lambda _: None),
        "time": SimpleNamespace(monotonic=world.loop.time),
        "os": SimpleNamespace(path=SimpleNamespace(exists=lambda _: False)),
        "Tool": SimpleNamespace(of=lambda order: SimpleNamespace(criu="", images=order["images"])),
    }  # fmt: skip
    with patch.multiple(whereabouts, **stand_ins), patch.object(Process, "world", world, create=True):
        yield
