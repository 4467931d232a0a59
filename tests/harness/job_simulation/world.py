"""One job on several hosts: all their real proxyds, above the device servers of the fault schedules."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hosts_simulation.lives import LIFE, HostsLoop
from hosts_simulation.network import Network
from simulation.device import Device
from simulation.judgement import judge
from simulation.layouts import Shape
from simulation.log import Log
from simulation.process import Process
from simulation.programs import mix
from simulation.schedules import Schedule
from simulation.world import World

from job_simulation.carrier import Carrier
from job_simulation.etcd import Etcd
from job_simulation.images import Images
from job_simulation.pages import Pages
from job_simulation.proxyd import LAUNCHER_PID, Host, Proxyd
from job_simulation.schedules import HostFault
from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Refused
from understudy.recovery.machine.activity import ProcessState
from understudy.recovery.planning.agreement import HostState
from understudy.recovery.planning.facts import Facts
from understudy.recovery.state.jobs import Job, Session

JOB = "simulated"
SETTLES_S = 70.0
"""Once nothing goes wrong any more, everybody has heard of everything."""
FIRST_PID = 1_000_000
SOONEST_S, LATEST_S = 10.5, 18.0
"""After so long the others agree that a host is lost."""


class HostsWorld(World):
    """Everything of one schedule."""

    def __init__(
        self, seed: int, shape: Shape, schedule: Schedule, places: dict[str, list[int]],
        troubles: tuple[HostFault, ...], loop: HostsLoop, longest_s: float, *,
        folder: Path | None = None, spare_devices: int = 1, watches: bool = False,
    ) -> None:  # fmt: skip
        """`places`: the ranks of each host; the first one leads.  `troubles`: what befalls hosts.

        `folder`: an empty one, for images of workers; None: none are taken.  `watches`: whether proxyds do.
        """
        self.folder, self.spare_devices, self.watches = folder, spare_devices, watches
        self.places, self.troubles, self._longest_s = places, troubles, longest_s
        self.by_pid: dict[int, Device] = {}
        self.settled = False
        self.adopted = 0
        """How often a proxyd has taken over from one that died."""
        self.validate_every = schedule.validates
        super().__init__(seed, shape, schedule, loop)

    def _begin(self) -> None:
        loop = cast(HostsLoop, self.loop)
        self.network = Network(loop, random.Random(mix(self.seed, 41)), self._complain)
        self.network.rough = False
        self.etcd = Etcd(loop, random.Random(mix(self.seed, 42)))
        self.hosts = {name: Host(self, name, ranks) for name, ranks in self.places.items()}
        self.placed: dict[tuple[str, str], Log] = {}
        """By host and directory; a rank has two where its host was only cut off, and it goes on elsewhere."""
        self._workers_of: dict[Log, Process] = {}
        self._taken_for_lost = False
        self.home = {rank: self.hosts[name] for name, ranks in self.places.items() for rank in ranks}
        self._job = Job(JOB, None, [])
        self.storage = None
        self.pages = Pages(self._log_at)
        self.decided = 0
        """Generation of the newest decision that was written down."""
        self.moves = cast(Any, SimpleNamespace(begun=0, arrived=0, check=lambda: None))
        self.carrier, self.images = Carrier(self, loop), Images(self)
        self._nobody = Device(self, 0)
        """In place of the server that a rank does not have yet."""
        self._nobody.process.running = False
        self.pool = cast(Any, SimpleNamespace(ready=[], outage_until=0.0))

    def _log_at(self, directory: str) -> Log | None:
        life = LIFE.get()
        return self.placed.get((life.host, directory)) if life is not None else None

    def place(self, directory: Path, rank: int) -> Log:
        """A rank opens on the host whose proxyd's step runs."""
        life, log = LIFE.get(), self.logs[rank]
        assert life is not None
        self.placed[life.host, str(directory)] = log
        return log

    def log_of(self, device: Device, request: Any) -> Log:
        """Which one a server is told to take."""
        return self.placed[self.host_of(device).name, request.log_directory]

    def host_of(self, device: Device) -> Host:
        """Where it runs."""
        return next(host for host in self.hosts.values() if device.pid in host.servers)

    def begin_worker(self, host: Host, pid: int, log: Log) -> Process:
        """A process of a rank."""
        worker = Process(pid, lambda: self._ends(worker))
        host.workers[pid] = self._workers_of[log] = worker
        return worker

    @property
    def job(self) -> Job:
        """As whoever leads it knows it, or led it last."""
        leading = [
            (known.span.leading.token, known)
            for host in self.hosts.values()
            if host.life is not None and host.proxyd is not None and host.proxyd.serves.is_set()
            if (known := host.proxyd.job) is not None and known.span is not None
            if known.span.leading is not None
        ]
        if leading:
            self._job = max(leading, key=lambda one: one[0])[1]
        return self._job

    # ------------------------------------------------------------------ what the devices see
    def later(self, seconds: float, callback: Callable[[], Any]) -> asyncio.TimerHandle:
        """Whoever lives then."""
        return cast(HostsLoop, self.loop).outside(seconds, callback)

    def is_decided(self, generation: int) -> bool:
        """An older request may come late."""
        return generation <= self.decided

    def new_device(self) -> Device:
        """A device server that has started."""
        device = super().new_device()
        self.by_pid[device.pid] = device
        return device

    def device_at(self, name: str) -> Device | None:
        """Who listens at an address; those of other hosts over the data network."""
        scheme, _, rest = name.partition(":")
        if scheme != "tls":
            return super().device_at(name)
        host, _, place = rest.partition("@")
        device = super().device_at(f"unix:{place}")
        if device is not None and device.pid not in self.hosts[host].servers:
            raise self.violation(f"state of server {device.pid} is asked for on host {host}")
        return device

    def process_state(self, pid: int) -> ProcessState | None:
        """As the kernel tells of a device server."""
        device = self.by_pid.get(pid)
        if device is None or not device.process.running:
            return None
        at_work = frozenset({"its thread"}) if device.at_work else frozenset[str]()
        return ProcessState("T" if device.stall.stopped else "S", at_work, 0)

    def device_of(self, session: Session) -> Device:
        """The session's present server, wherever it is known from."""
        return self.by_pid.get(session.server.pid, self._nobody)

    def count_event(self) -> None:
        """After every event: what must hold at any time."""
        self.events += 1

    def may_have_failed(self, facts: Facts) -> Collection[int]:
        """Of the death of a peer on another host its neighbours may tell before its own host does."""
        return range(self.shape.world)

    def _extend(self, log: Log) -> None:
        log.extend()
        for device in list(self.devices.values()):
            if device.log is log and device.process.running:
                device.go_on()

    def _report(self, kind: str, rank: int, generation: int, message: str = "", index: int = 0) -> None:
        report = pb.FaultReport(
            job=JOB, rank=rank, kind=kind, message=message, generation=generation, record_index=index
        )
        assert self.speaker is not None
        self.speaker.account.fault = report
        proxyd = self.host_of(self.speaker).proxyd
        if proxyd is not None and proxyd.life.alive and proxyd.serves.is_set():
            proxyd.ask(lambda: proxyd.agent.remote_ranks.tell(report))
        self.count_event()

    def collective_failed(self, rank: int, generation: int, message: str, index: int) -> None:
        """A device server reports a failed collective."""
        self._report("collective", rank, generation, message, index)

    def call_failed(self, rank: int, generation: int, suspect: bool, index: int) -> None:
        """A device server reports that a call failed by its driver's doing."""
        self._report("suspect" if suspect else "call", rank, generation, "injected", index)

    def restart_refused(self, rank: int, generation: int) -> None:
        """A device server reports that it cannot be rolled through the step that it is in."""
        self.refusals += 1
        self._report("restart", rank, generation, "refused", self.logs[rank].cursor_index)

    def validation_reached(self, rank: int, generation: int) -> None:
        """A device server reports that it stands between the two passes of a validation."""
        self.standings += 1
        self._report("validation", rank, generation)

    def worker_ended(self, rank: int) -> None:
        """Its process is gone, whatever its program had still to do."""
        self._ends(self.workers[rank])

    def leaves(self, log: Log) -> None:
        """As World."""
        self._ends(self._workers_of[log])

    def _ends(self, worker: Process) -> None:
        if worker.running:
            worker.running = False
            self.later(0.001, lambda: self._worker_gone(worker))

    def _worker_gone(self, worker: Process) -> None:
        self.tell_end(worker)
        self._look_at_launchers()

    def _look_at_launchers(self) -> None:
        """Each ends once none of the workers runs that it has started, wherever."""
        for host in self.hosts.values():
            if not any(worker.running for worker in host.launched.values()):
                host.launcher_ended.set()
        if not any(one.running for one in self.workers):
            self._over.set()

    def tell_end(self, worker: Process) -> None:
        """To whoever watches it."""
        worker.ended_ns = self.loop.nanoseconds()
        worker.ended.set()
        for follower in worker.followers:
            follower()

    # ------------------------------------------------------------------ what the proxyds see
    def journal_written(self, _: Path, written: pb.Journal) -> None:
        """By the proxyd whose step runs."""
        life = LIFE.get()
        assert life is not None
        host = self.hosts[life.host]
        host.journal = written.SerializeToString()
        for job in written.jobs:
            self.decided = max(self.decided, job.decision.generation)

    def died(self, proxyd: Proxyd) -> None:
        """Its kernel closes its connections; processes that it watched go on."""
        self.faults["proxyd died"] += 1
        self.network.died(proxyd.life)
        if not self.settled and not proxyd.host.lost_at:
            self.later(proxyd.host.back_after_s, partial(self._follow_up, proxyd.host, proxyd))

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        if not cast(HostsLoop, self.loop).over:
            super()._unhandled(loop, context)

    def _complain(self, text: str) -> None:
        if not cast(HostsLoop, self.loop).over:
            self.violations.append(f"{text} (at {self.loop.time():.6f} s)")
            self._over.set()

    # ------------------------------------------------------------------ running it
    async def run(self) -> None:
        """Until every worker has ended, and everybody has heard of it."""
        self.loop.set_exception_handler(self._unhandled)
        try:
            self.injector.meddles = False  # who gets no device when it opens says so, and ends
            await self._open_all()
            self.injector.meddles = True
            for host in self.hosts.values():
                self.loop.create_task(host.close_job())
            for fault in self.schedule.faults:
                self.injector.arrange(fault)
            self.network.rough = self.etcd.rough = bool(self.troubles)
            for trouble in self.troubles:
                if not trouble.call:
                    self.later(trouble.at, partial(self._befall, trouble))
            try:
                await asyncio.wait_for(self._over.wait(), self._longest_s)
            except TimeoutError:
                late = [f"{log.rank} at {log.cursor_index}" for log in self.logs if not log.session_state]
                raise self.violation(f"no end: ranks {', '.join(late[:8])}") from None
            if not self.violations:
                await self._settle()
        finally:
            self.settled = True
        if not self.violations:
            self.faults["lost requests"] = self.network.lost
            self.moves.begun = self.carrier.ordered
            judge(self)

    async def _open_all(self) -> None:
        self.workers = [
            self.begin_worker(self.home[log.rank], FIRST_PID + log.rank, log) for log in self.logs
        ]
        for rank, worker in enumerate(self.workers):
            self.home[rank].launched[rank] = worker
        for log in self.logs:
            log.takes_snapshots = self.schedule.snapshots
        for host in self.hosts.values():
            if self.folder is not None:
                (self.folder / host.name).mkdir()
            proxyd = host.begin()
            await proxyd.serves.wait()
            opening = pb.OpenJobRequest(job=JOB, hosts=len(self.hosts), launcher_pid=LAUNCHER_PID)
            await self._as(proxyd, proxyd.spans.open_job(opening, []))
        await asyncio.gather(*(self._open_rank(rank) for rank in range(self.shape.world)))

    async def _open_rank(self, rank: int) -> None:
        host = self.home[rank]
        proxyd = host.proxyd
        assert proxyd is not None
        request = pb.OpenSessionRequest(
            job=JOB, rank=rank, world=self.shape.world, device_index=host.ranks.index(rank), threads=1,
            torch_version="2", worker_pid=self.workers[rank].pid, relay=f"/{host.name}/relays/{rank}/s",
        )  # fmt: skip
        await self._as(proxyd, proxyd.agent.open_session(request))

    async def _as(self, proxyd: Proxyd, work: Any) -> Any:
        """What a process of its host asks it, answered."""
        try:
            return await asyncio.shield(proxyd.life.start(work))
        except Refused as problem:
            raise self.violation(f"{proxyd.host.name} refuses: {problem}") from problem

    def request_arrives(self, call: str, nth: int) -> None:
        """At a device server."""
        for trouble in self.troubles:
            if (trouble.call, trouble.nth) == (call, nth):
                self._befall(trouble)

    def _befall(self, trouble: HostFault) -> None:
        if self.settled or self._over.is_set():
            return
        host = self.hosts[trouble.host]
        if trouble.kind == "cut":
            self.faults["cut"] += 1
            others = [name for name in self.hosts if name != host.name and name in (trouble.other or name)]
            for other in others:
                self.network.cut(host.name, other)
                self.later(trouble.lasts, partial(self.network.heal, host.name, other))
        elif trouble.kind == "etcd away":
            self.faults["etcd away"] += 1
            self.etcd.away_until = max(self.etcd.away_until, self.loop.time() + trouble.lasts)
        elif trouble.kind == "move":
            ranks = [rank for rank in sorted(self.home) if self.workers[rank].running]
            if ranks:
                self.carrier.order(ranks[trouble.steps % len(ranks)], trouble.host)
        elif trouble.kind == "device lost":
            self._lose_device(host, trouble.steps)
        elif trouble.kind == "drain":
            self.carrier.drain(host, trouble.steps)
        elif trouble.kind == "cut off":
            self._cut_off(host, trouble.lasts)
        elif trouble.kind == "host lost":
            self._lose_host(host)
        elif trouble.kind == "die" and host.life is not None:
            host.life.steps_left, host.back_after_s = trouble.steps, trouble.lasts

    def _lose_device(self, host: Host, place: int) -> None:
        """A GPU falls off the bus under the server of some rank there, which says so and dies."""
        ranks = [rank for rank in sorted(self.home) if self.home[rank] is host]
        serving = [one for one in self.devices.values() if one.process.running and one.rank in ranks]
        if serving:
            device = serving[place % len(serving)]
            assert device.log is not None
            self.faults["device lost"] += 1
            device.log.device_lost, device.log.device_message = 1, "it fell off the bus"
            device.kill()

    def _lose_host(self, host: Host) -> None:
        """For good, with all that runs there; nobody is told."""
        if host.lost_at:
            return
        self.faults["host lost"] += 1
        host.lost_at = self.loop.time()
        self._isolate(host)
        if host.life is not None:
            host.life.die()
        host.incoming.clear()
        host.incoming_unheard.clear()
        for rank, worker in enumerate(self.workers):
            if self.home[rank] is host:
                worker.running = False
        for pid in host.servers:
            self.by_pid[pid].kill()
        self.later(LATEST_S, self._look_at_launchers)  # relays elsewhere hear that their workers are lost

    def _cut_off(self, host: Host, lasts: float) -> None:
        """From all others, and from etcd, over either network; all that runs there goes on."""
        if host.lost_at or host.cut_off_at:
            return
        self.faults["cut off"] += 1
        host.cut_off_at = self.loop.time()
        self._isolate(host)
        self.etcd.cut_off.add(host.name)
        for pid in host.servers:
            if (device := self.by_pid[pid]).state == "running":
                device.collective_failed("No route to host")
        self.later(lasts, partial(self._is_back, host))

    def _isolate(self, host: Host) -> None:
        """No other proxyd reaches it, whatever link is healed meanwhile."""
        for other in self.hosts:
            if other != host.name:
                self.network.cut(host.name, other)
        self.network.gone.add(host.name)

    def _is_back(self, host: Host) -> None:
        if host.lost_at or not host.cut_off_at:
            return
        host.cut_off_at = 0.0
        self.network.gone.discard(host.name)
        self.etcd.cut_off.discard(host.name)
        for other in self.hosts:
            self.network.heal(host.name, other)

    def state_of(self, name: str, viewer: str) -> HostState:
        """What hosts agree on; each learns of it in its own time."""
        since = self.hosts[name].lost_at or self.hosts[name].cut_off_at
        if self.hosts[viewer].cut_off_at:
            return HostState.ALIVE if name == viewer else HostState.UNKNOWN
        if not since:
            return HostState.ALIVE
        chance = random.Random(mix(self.seed, 45, ord(name[0]), ord(viewer[0])))
        if self.loop.time() < since + chance.uniform(SOONEST_S, LATEST_S):
            return HostState.SUSPECTED
        self._taken_for_lost = True
        return HostState.LOST

    def may_be_open(self, log: Log) -> bool:
        """A worker that was lost with its host, and the others with it, or had ended before."""
        return super().may_be_open(log) or bool(self.home[log.rank].lost_at)

    def is_excused(self, why: str) -> bool:
        """Hosts are lost, and the job with them; the sentence says why it could not go on.

        What goes with images that count is never let go of.
        """
        held = "the snapshot that goes with them is gone" not in why and "does not reach back" not in why
        return self._taken_for_lost and held and why.startswith(("host ", "hosts ", "this host was given up"))

    def _follow_up(self, host: Host, former: Proxyd) -> None:
        """Whatever watches over proxyds starts another one."""
        if host.proxyd is former:
            self._succeed(host)

    def _succeed(self, host: Host) -> None:
        self.adopted += 1
        host.begin()

    async def _settle(self) -> None:
        """Nothing goes wrong any more: is anything left?"""
        self.settled = True
        self.network.rough = self.etcd.rough = False
        for host in self.hosts.values():
            self._is_back(host)
        self.network.heal_all()
        self.etcd.away_until = 0.0
        for host in self.hosts.values():
            if host.proxyd is not None:
                host.proxyd.life.steps_left = -1
            if host.life is None and not host.lost_at:
                self._succeed(host)
        await asyncio.sleep(SETTLES_S)
        for host in self.hosts.values():
            proxyd = host.proxyd
            assert proxyd is not None
            if host.lost_at:
                continue
            if (job := proxyd.job) is not None:
                states = {rank: session.state for rank, session in job.sessions.items()}
                raise self.violation(f"host {host.name} keeps a job that is over: {states}")
            if held := [index for index in range(len(host.ranks)) if proxyd.leases.holder(index) is not None]:
                raise self.violation(f"host {host.name} keeps devices {held} for nobody")
        serving = [one.pid for one in self.devices.values() if one.process.running and one.log is not None]
        if serving:
            raise self.violation(f"device servers {serving} are left")
        if left := [one.pid for one in self._workers_of.values() if one.running]:
            raise self.violation(f"workers {left} are left")
