"""A host as far as workers move: moving_host.py NAME ADDRESS CERTS PEERS SOCKET.

PEERS: {"NAME": "ADDRESS"} as JSON; SOCKET: where a test orders, a line of JSON each.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc.aio

from understudy import replay
from understudy.protos import control_pb2 as pb
from understudy.recovery.machine.allocation import keep_freed_memory
from understudy.recovery.machine.processes import start_ticks
from understudy.recovery.machine.runtime_directory import RuntimeDirectory
from understudy.recovery.membership.network.certificates import load
from understudy.recovery.membership.network.endpoint import HostsService, listen
from understudy.recovery.membership.network.links import Links
from understudy.recovery.migration.incoming import unfollowed
from understudy.recovery.migration.process.namespaces import pid_here, unshare
from understudy.recovery.migration.relay.orders import order
from understudy.recovery.migration.transfer.dumping import DumpedWorker
from understudy.recovery.migration.transfer.header import Here
from understudy.recovery.migration.transfer.moves import Callbacks, Moves
from understudy.recovery.migration.transfer.reception import NotSent
from understudy.recovery.migration.transfer.shipping import send_worker
from understudy.recovery.planning.agreement import Vote
from understudy.recovery.takeover.leftovers import remove_leftovers

CLONE_NEWTIME = 0x80
if shift := os.environ.pop("CLOCK_AHEAD_S", ""):
    unshare(CLONE_NEWTIME)  # it is entered by exec
    Path("/proc/self/timens_offsets").write_text(f"monotonic {shift} 0\nboottime {shift} 0\n")
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv])
RELAY = "from understudy.recovery.migration.relay.relaying import main; import sys; main(sys.argv[1:])"
name, address, certs, peers, socket = sys.argv[1:6]
JOB = "j"


class TrappedMoves(Moves):
    """What a test orders happens at a step: "kill", "kill after" it, "wait", "hang", or "damage"."""

    traps: dict[str, str]
    waits: asyncio.Event
    go_on: asyncio.Event

    async def _at(self, step: str, done: Awaitable[Any]) -> Any:
        how = self.traps.pop(step, "")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "wait":
            self.waits.set()
            await self.go_on.wait()
        if how == "hang":
            await asyncio.Event().wait()
        answer = await done
        if how == "kill after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    async def ReceiveWorker(self, parts: Any, context: Any) -> Any:
        return await self._at("ReceiveWorker", super().ReceiveWorker(self._changed(parts), context))

    async def _changed(self, parts: Any) -> AsyncIterator[pb.WorkerPart]:
        async for part in parts:
            if part.WhichOneof("part") == "data":
                match self.traps.pop("part", ""):
                    case "damage":
                        part.data.data = bytes([part.data.data[0] ^ 1]) + part.data.data[1:]
                    case "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "fill":
                        assert self.images is not None
                        fill(self.images / "filler")
            yield part

    async def FinishMove(self, request: Any, context: Any) -> Any:
        return await self._at("FinishMove", super().FinishMove(request, context))

    async def StartWorker(self, request: Any, context: Any) -> Any:
        return await self._at("StartWorker", super().StartWorker(request, context))


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb") as file:
        while True:
            file.write(bytes(1 << 20))


class MovingHost:
    def __init__(self, runtime: Path, links: Links) -> None:
        self.runtime = runtime
        self.relays: list[asyncio.subprocess.Process] = []
        self.here: dict[str, tuple[int, Path]] = {}
        self.events: list[list[Any]] = []
        self.found = Here.look(name, "2.13.0")
        self.moves = TrappedMoves(
            self.found, runtime, links.to,
            Callbacks(self._arrived, self._left, self._free_devices),
            Path(os.environ["IMAGES"]) if "IMAGES" in os.environ else None,
        )  # fmt: skip
        self.moves.traps = {}
        self.moves.waits, self.moves.go_on = asyncio.Event(), asyncio.Event()
        unfollowed.ASK_EVERY_S = float(os.environ.get("UNFOLLOWED_S", "60"))
        self.moves.decision_s = float(os.environ.get("DECISION_S", "150"))

    def _free_devices(self) -> int:
        return int(os.environ.get("DEVICES", "8")) - len(self.here)

    def _arrived(self, header: pb.WorkerHeader, pid: int, directory: Path) -> None:
        self.here[header.relay] = pid, directory
        self.events.append(["arrived", header.rank, bytes(header.more).decode()])

    def _left(self, header: pb.WorkerHeader, how: str) -> None:
        self.here.pop(header.relay, None)
        self.events.append(["left", header.rank, how])

    async def start(self, rank: int, command: list[str], folder: str) -> dict[str, Any]:
        directory = self.runtime / JOB / f"rank-{rank}"
        directory.mkdir(mode=0o700, parents=True)
        replay.create_log(
            str(directory), rank=rank, world=9, segment_bytes=4 << 20, segment_count=4,
            proxyd_pid=os.getpid(), proxyd_start_ticks=start_ticks(os.getpid()), proxyd_grace_s=60,
        )  # fmt: skip
        (directory / "marks").write_bytes(bytes(8 << 20))
        relays = self.runtime / "r.01234567"
        relays.mkdir(mode=0o700, exist_ok=True)
        before = set(relays.iterdir())
        with open(f"{folder}/out.{rank}", "w") as out, open(f"{folder}/err.{rank}", "w") as errors:
            self.relays.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-c",
                    RELAY,
                    *command,
                    str(directory),
                    cwd=folder,
                    env={"UNDERSTUDY_RELAYS": str(relays), "PATH": "/usr/bin:/bin"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,
                )
            )
        while not (new := set(relays.iterdir()) - before) or not all((one / "s").exists() for one in new):
            await asyncio.sleep(0.01)
        (relay,) = new
        known = await order(relay, "where")
        self.here[str(relay)] = pid_here(known["pid"], known["namespace"]), directory
        return {"relay": str(relay), "number": len(self.relays) - 1}

    async def obey(self, what: dict[str, Any]) -> dict[str, Any]:
        match what.pop("do"):
            case "start":
                return await self.start(**what)
            case "send":
                pid, directory = self.here[what["relay"]]
                worker = DumpedWorker(
                    JOB, what["rank"], 9, directory, Path(what["relay"]), pid, more=b"of the lead's"
                )
                try:
                    done = await send_worker(self.moves, worker, what["to"], what.get("patience_s", 120))
                except NotSent as problem:
                    return {"error": str(problem)}
                self.here.pop(what["relay"], None)
                return asdict(done)
            case "signal":
                self.relays[what["number"]].send_signal(what["signal"])
            case "wait":
                return {"status": await self.relays[what["number"]].wait()}
            case "pid":
                return {"pid": self.here.get(what["relay"], (0,))[0]}
            case "runtime":
                return {"path": str(self.runtime)}
            case "where":
                return await order(Path(what["relay"]), "where")
            case "trap":
                self.moves.traps |= what
            case "waits":
                return {"waits": self.moves.waits.is_set()}
            case "go on":
                self.moves.go_on.set()
            case "lost":
                self.moves.host_is_lost(what["host"], what["sentence"])
            case "back":
                self.moves.outgoing.trust(what["host"])
            case "lacks":
                machine = replace(self.found.machine, **what["machine"])
                self.moves.here = replace(self.found, machine=machine, **what["here"])
            case "events":
                return {"events": self.events}
            case "files":
                places = [self.runtime.parent, Path(tempfile.gettempdir())]
                found = [path for place in places for path in place.glob("understudy-*")]
                images = [path for path in found if "arriving" in path.name or "images" in path.name]
                guests = [path for path in found if path.parent == places[0] and path != self.runtime]
                # Not rglob, which fails at a folder that goes meanwhile.
                own = sorted(
                    os.path.relpath(os.path.join(folder, name), self.runtime)
                    for folder, folders, files in os.walk(self.runtime)
                    for name in [*folders, *files]
                )
                return {
                    "files": sorted({str(path) for path in images + guests}), "own": own,
                    "descriptors": len(os.listdir("/proc/self/fd")),
                }  # fmt: skip
        return {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            done = await self.obey(json.loads(await reader.readline()))
        except Exception as problem:  # noqa: BLE001 - a test is to see it
            done = {"error": f"{type(problem).__name__}: {problem}"}
        writer.write(json.dumps(done).encode() + b"\n")
        writer.close()


async def main() -> None:
    known = json.loads(peers)
    credentials = load(Path(certs), name)
    links = Links(lambda host: pb.HostRecord(name=host, address=known[host]), credentials)
    left = os.environ.get("RUNTIME")
    runtime = RuntimeDirectory.take_over(Path(left)) if left else RuntimeDirectory.make()
    host = MovingHost(runtime.path, links)
    remove_leftovers()
    await host.moves.resume()

    async def reach(_: str) -> Vote:
        return Vote(None, "not asked")

    service = HostsService("tests", lambda: pb.HostRecord(name=name), reach)
    server: grpc.aio.Server = await listen(address, credentials, service, [host.moves.add_to])
    orders = await asyncio.start_unix_server(host.serve, socket)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    orders.close()
    await host.moves.close()
    await server.stop(0.2)
    await links.close()
    for relay in host.relays:
        with contextlib.suppress(TimeoutError):  # its worker may have just ended
            await asyncio.wait_for(relay.wait(), 1)
        if relay.returncode is None:
            relay.kill()
            await relay.wait()
    runtime.remove()


keep_freed_memory()  # as proxyd does
asyncio.run(main())
