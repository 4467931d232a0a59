"""One device server: the C++ executor and the gRPC service through which proxyd steers it."""

from __future__ import annotations

from understudy.protos import least_tls  # before whatever else loads gRPC

# isort: split
import contextlib
import hmac
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent import futures
from pathlib import Path

import grpc

from understudy.protos import control_pb2 as pb
from understudy.protos import services as rpc
from understudy.proxy_server import _server
from understudy.proxy_server.backends import ENVIRONMENT, BackendFactory
from understudy.proxy_server.capability import Capability
from understudy.proxy_server.daemon_channel import MESSAGE_LIMIT, FaultReporter, daemon_channel
from understudy.proxy_server.guardian import Charge, Guardian, Identity
from understudy.proxy_server.host_identity import HostIdentity
from understudy.proxy_server.remote_state import PREFIX as REMOTE
from understudy.proxy_server.remote_state import (
    Asker,
    RemoteReplica,
    ReplicaStateService,
    StateNotFetched,
    serve_state,
)
from understudy.proxy_server.rendezvous_store import RendezvousCancelled, RendezvousGate
from understudy.proxy_server.shared_state import PREFIX as SHARED
from understudy.proxy_server.shared_state import SharedDirectory, StateNotWritten, fetch_shared
from understudy.proxy_server.state_copy import (
    NotReadable,
    Sender,
    Wanted,
    fetch_state,
    memory_of,
    read_where_it_lies,
)

READY_BYTES = 32 << 20
"""Of memory that a server on processors takes ahead: to take it costs more than to copy state into it."""
MOST_TOLD = 65536
"""Buffers whose places go to the leader, who may be on another host."""


def trouble_of(device: str) -> str:
    """What keeps it from computing; empty if it does, or answers that its memory is full.

    Somebody's memory may be given back; a device that is fenced for it would stay so.
    """
    try:
        _server.try_device(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, proxyd must hear of it
        said = str(error).partition("\n")[0]
        return "" if "out of memory" in said else said
    return ""


class DeviceService(rpc.DeviceServerServicer):
    """Maps requests to the executor. Steering calls are serialised; reads of state may overlap."""

    def __init__(
        self, daemon: grpc.Channel, capability: Capability, guardian: Guardian, data_address: str,
        *, own_collectives: bool = False,
    ) -> None:  # fmt: skip
        self.identity: HostIdentity | None = None
        """By which device servers of other hosts know this one; None: there are none."""
        self.remote: grpc.Server | None = None
        self.data_address = ""
        """IP:PORT at which they read state."""
        self.shared: SharedDirectory | None = None
        """Where they read what they do not reach here."""
        self._capability = capability
        self._gate = RendezvousGate()
        self._factory = BackendFactory(
            daemon, capability.driver, self._gate, data_address, own=own_collectives
        )
        self._reporter = FaultReporter(daemon)
        self._guardian = guardian
        self._sender = Sender()
        self._steering = threading.Lock()
        self._attached: pb.AttachRequest | None = None
        self._generation = 0
        self._newest = 0
        self._parked = False
        self._restoring = self._rebuilding = False
        self._connecting: int | None = None
        """In which generation communicators are connected already."""
        self._holds_state = False
        self._restored_commit = 0
        self.device = ""
        self.executor = _server.Executor(self._factory)
        threading.Thread(target=self._report_faults, name="faults", daemon=True).start()

    def _report_faults(self) -> None:
        while True:
            fault = self.executor.wait_for_fault(60_000)
            attached = self._attached
            if fault is None or attached is None:
                continue
            kind, message, record_index = fault
            self._reporter.tell(
                pb.FaultReport(
                    job=attached.job, rank=attached.rank, generation=self._generation, kind=kind,
                    message=message, record_index=record_index,
                )
            )  # fmt: skip

    def _refuse_old(self, generation: int, context: grpc.ServicerContext) -> None:
        """Raise if proxyd has begun another round since it sent this, or died; else note its generation."""
        if not context.is_active():
            raise RuntimeError("whoever asked for this has died or waits no more")
        if generation < self._newest:
            raise RuntimeError(f"a request of generation {generation} came after one of {self._newest}")
        self._newest = generation

    # ------------------------------------------------------------------ service
    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthReply:
        return pb.HealthReply(
            pid=os.getpid(),
            state=self.executor.state,
            cursor_index=self.executor.cursor_index,
            capability=self._capability.message(),
            torch_version=_server.TORCH_VERSION,
            data_address=self.data_address,
        )

    def TryDevice(self, request: pb.TryDeviceRequest, context: grpc.ServicerContext) -> pb.TryDeviceReply:
        return pb.TryDeviceReply(error=trouble_of(self._device()))

    def _device(self) -> str:
        return self.device or f"{self._capability.driver}:0"

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        with self._steering:
            try:
                self._factory.job, self._factory.rank = request.job, request.rank
                self._factory.forget()
                self._gate.begin()
                self._generation = self._newest = request.generation
                self._attached = request
                self._holds_state, self._parked, self._restored_commit = request.run, not request.run, 0
                self._reporter.forget()
                worker = Identity(request.worker.pid, request.worker.start_ticks)
                self._guardian.work_for(Charge(worker, Path(request.log_directory)))
                self.executor.attach(
                    request.log_directory,
                    device=self._device(),
                    threads=request.threads,
                    protect=request.policy.protect,
                    optimizer_preimages=request.policy.optimizer_preimages,
                    generation=request.generation,
                    block_until_commit=request.block_until_commit,
                )
                if request.run:
                    self.executor.resume()
            except Exception as error:  # noqa: BLE001 - whatever it is, proxyd must hear of it
                return pb.AttachReply(error=f"{type(error).__name__}: {error}")
            return pb.AttachReply()

    def Park(self, request: pb.ParkRequest, context: grpc.ServicerContext) -> pb.ParkReply:
        if request.generation >= self._newest and context.is_active():
            self._gate.cancel(request.generation)
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._parked = True
                self.executor.park()
            except Exception as error:  # noqa: BLE001
                return pb.ParkReply(error=f"{type(error).__name__}: {error}")
            return pb.ParkReply(cursor_index=self.executor.cursor_index, commit=self.executor.commit)

    def Hold(self, request: pb.HoldRequest, context: grpc.ServicerContext) -> pb.HoldReply:
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._parked = True
                self.executor.hold()
            except Exception as error:  # noqa: BLE001
                return pb.HoldReply(error=f"{type(error).__name__}: {error}")
            return pb.HoldReply()

    def LetGo(self, request: pb.LetGoRequest, context: grpc.ServicerContext) -> pb.LetGoReply:
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._parked = False
                self.executor.let_go()
            except Exception as error:  # noqa: BLE001
                return pb.LetGoReply(error=f"{type(error).__name__}: {error}")
            return pb.LetGoReply()

    def Rewind(self, request: pb.RewindRequest, context: grpc.ServicerContext) -> pb.RewindReply:
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._holds_state, self._connecting = False, None
                rewound = self.executor.rewind(request.commit)
                self._holds_state = True
                if request.connect:
                    self._connect_early(request.generation)
                return pb.RewindReply(bytes=rewound, memory=memory_of(self.executor, MOST_TOLD))
            except Exception as error:  # noqa: BLE001
                return pb.RewindReply(error=f"{type(error).__name__}: {error}")

    def Restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext) -> pb.RestoreReply:
        begin = time.monotonic()
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._restoring, self._holds_state, self._connecting = True, False, None
                if request.from_snapshot and request.commit:
                    shadow_bytes = self.executor.restore_snapshot(request.commit)
                else:
                    shadow_bytes = self.executor.restore(request.commit)
                if request.connect:
                    self._connect_early(request.generation)
                fetched, unread = [], {}
                for source in request.sources:
                    try:
                        fetched.append(self._fetch(source, request.generation))
                    except StateNotFetched as problem:
                        unread[source.rank] = str(problem)
                if unread:
                    return pb.RestoreReply(error="; ".join(unread.values()), unread=unread)
                copied = sum(count for count, _ in fetched)
                self.executor.complete_restore(
                    [(copy.handle, copy.digest) for source in request.sources for copy in source.copies]
                )
                if request.HasField("roll_forward"):
                    roll = request.roll_forward
                    self.executor.roll_forward(
                        rolled=list(roll.rolled), steady=list(roll.steady), own=list(roll.own),
                        lost=[*roll.lost, *(handle for _, gone in fetched for handle in gone)],
                        step_digest=roll.step_digest,
                    )  # fmt: skip
                self._holds_state, self._restored_commit = True, request.commit
            except Exception as error:  # noqa: BLE001
                return pb.RestoreReply(error=f"{type(error).__name__}: {error}")
            finally:
                self._restoring = False
        return pb.RestoreReply(
            copied_bytes=copied, shadow_bytes=shadow_bytes, seconds=time.monotonic() - begin
        )

    def _connect(self, generation: int) -> None:
        """Begin to connect communicators, which are those of the commit where the executor stands."""
        self._factory.forget()
        self._gate.open(generation)
        self.executor.begin_rebuild(generation)
        self._connecting = generation

    def _connect_early(self, generation: int) -> None:
        """RebuildCommunicators tells if that cannot be."""
        with contextlib.suppress(RendezvousCancelled):
            self._connect(generation)

    def _fetch(self, source: pb.ReplicaSource, generation: int) -> tuple[int, list[int]]:
        """As `_copy_from`; what is not there any more comes from another buffer of equal content."""
        copied, gone = self._copy_from(source, generation)
        lost: list[int] = []
        while gone:
            source = _from_others(source, gone)
            lost += set(gone) - {copy.handle for copy in source.copies}
            more, gone = self._copy_from(source, generation) if source.copies else (0, [])
            copied += more
        return copied, lost

    def _copy_from(self, source: pb.ReplicaSource, generation: int) -> tuple[int, list[int]]:
        """Fetch contents; answers the bytes, and handles whose content is not there any more."""
        handles: dict[int, list[int]] = defaultdict(list)
        sizes: dict[int, int] = {}
        for copy in source.copies:
            handles[copy.source_handle].append(copy.handle)
            sizes[copy.source_handle] = copy.bytes
        wanted = [Wanted(handle, size, handles[handle]) for handle, size in sizes.items()]
        attached = self._attached
        asker = Asker(*((attached.job, generation, attached.token) if attached else ("", 0, b"")))
        if source.address.startswith(REMOTE):
            replica = RemoteReplica(source.address, source.rank, self.identity, asker)
            return replica.fetch(wanted, self.executor)
        if source.address.startswith(SHARED):
            directory = self.shared.directory if self.shared is not None else None
            return fetch_shared(source.address, directory, source.rank, asker, wanted, self.executor)
        if source.HasField("memory"):
            with contextlib.suppress(NotReadable):
                return read_where_it_lies(source.memory, wanted, self.executor)
        with grpc.insecure_channel(source.address, options=MESSAGE_LIMIT) as channel:
            return fetch_state(rpc.DeviceServerStub(channel), wanted, self.executor)

    def _forget_copies(self) -> None:
        """What others needed has been copied."""
        self._sender.forget()
        _server.permit_reader(0)
        if self.shared is not None:
            self.shared.forget()

    def CopyState(self, request: pb.CopyStateRequest, context: grpc.ServicerContext) -> pb.CopyStateReply:
        try:
            return self._sender.copy(request, self.executor)
        except Exception as error:  # noqa: BLE001 - whoever copies must hear of it
            return pb.CopyStateReply(error=f"{type(error).__name__}: {error}")

    def LocateState(
        self, request: pb.LocateStateRequest, context: grpc.ServicerContext
    ) -> pb.LocateStateReply:
        try:
            _server.permit_reader(request.reader)
            return pb.LocateStateReply(memory=memory_of(self.executor))
        except Exception as error:  # noqa: BLE001 - whoever copies must hear of it
            return pb.LocateStateReply(error=f"{type(error).__name__}: {error}")

    def ReadState(
        self, request: pb.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StateChunk]:
        yield from self._sender.messages(request.handles, self.executor)

    def WriteState(self, request: pb.WriteStateRequest, context: grpc.ServicerContext) -> pb.WriteStateReply:
        """For a server of another host that cannot read it here."""
        attached, generation = self._attached, request.generation
        if self.shared is None:
            return pb.WriteStateReply(error="its host has no --shared-directory")
        if attached is None or not attached.token or generation != self._newest:
            return pb.WriteStateReply(error=f"here is no state of generation {generation} for other hosts")
        asker = Asker(attached.job, generation, attached.token)
        try:
            name, count = self.shared.write(
                asker, attached.rank, request.ranges, self.executor,
                lambda: bool(context.is_active()) and generation == self._newest,
            )  # fmt: skip
        except StateNotWritten as problem:
            return pb.WriteStateReply(error=str(problem))
        return pb.WriteStateReply(name=name, bytes=count)

    def refusal(self, request: pb.ReplicaStateRequest) -> str:
        """Why another host may not read the state here; empty: it may."""
        attached = self._attached
        if attached is None or not attached.token or not hmac.compare_digest(attached.token, request.token):
            return "that is not the token of a job whose state is here"
        if (request.job, request.rank) != (attached.job, attached.rank):
            return f"here is the state of rank {attached.rank}, not of rank {request.rank}"
        if request.generation != self._newest:
            return (
                f"generation {request.generation} asks for state, and generation {self._newest} is under way"
            )
        return ""

    def RebuildCommunicators(
        self, request: pb.RebuildRequest, context: grpc.ServicerContext
    ) -> pb.RebuildReply:
        begin = time.monotonic()
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._rebuilding = True
                if self._connecting != request.generation:
                    self._connect(request.generation)
                self._generation = request.generation
                rebuilt = self.executor.rebuild(request.generation)
            except Exception as error:  # noqa: BLE001
                return pb.RebuildReply(error=f"{type(error).__name__}: {error}")
            finally:
                self._rebuilding, self._connecting = False, None
        return pb.RebuildReply(communicators=rebuilt, seconds=time.monotonic() - begin)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> pb.ResumeReply:
        with self._steering:
            try:
                self._refuse_old(request.generation, context)
                self._parked = False
                self._reporter.forget()
                self._forget_copies()
                self.executor.resume()
            except Exception as error:  # noqa: BLE001
                return pb.ResumeReply(error=f"{type(error).__name__}: {error}")
            return pb.ResumeReply()

    def SetReplicated(
        self, request: pb.ReplicatedRequest, context: grpc.ServicerContext
    ) -> pb.ReplicatedReply:
        self.executor.set_replicated(list(request.handles))
        return pb.ReplicatedReply()

    def Adopt(self, request: pb.AdoptRequest, context: grpc.ServicerContext) -> pb.AdoptReply:
        self._guardian.follow(Identity(request.proxyd.pid, request.proxyd.start_ticks))
        if self._rebuilding:  # waits for peers at a store that opens once all have been adopted
            self._gate.cancel(self._newest)
        if not self._restoring:  # that may take minutes, and will have to be done again
            with self._steering:
                return self._account()
        return self._account()

    def FollowWorker(
        self, request: pb.FollowWorkerRequest, context: grpc.ServicerContext
    ) -> pb.FollowWorkerReply:
        self._guardian.follow_worker(Identity(request.worker.pid, request.worker.start_ticks))
        return pb.FollowWorkerReply()

    def _account(self) -> pb.AdoptReply:
        """How things stand, for a successor of the proxyd that knew."""
        attached = self._attached
        if attached is None:
            return pb.AdoptReply(newest_generation=self._newest)
        holds_state = self._holds_state and not self.executor.rolling
        return pb.AdoptReply(
            job=attached.job, rank=attached.rank, holds_state=holds_state, parked=self._parked,
            attached_generation=attached.generation, generation=self._generation,
            newest_generation=self._newest, restored_commit=self._restored_commit,
            fault=self._reporter.take(),
        )  # fmt: skip


def _from_others(source: pb.ReplicaSource, gone: Collection[int]) -> pb.ReplicaSource:
    """What is asked for next; on shared storage there is only what was asked for first."""
    left = [copy for copy in source.copies if copy.handle in gone and copy.other_source_handles]
    return pb.ReplicaSource(
        address=source.address, rank=source.rank,
        copies=[
            pb.ReplicaCopy(
                handle=copy.handle, source_handle=copy.other_source_handles[0], bytes=copy.bytes,
                digest=copy.digest, other_source_handles=copy.other_source_handles[1:],
            )
            for copy in left if not source.address.startswith(SHARED)
        ],
    )  # fmt: skip


def _serve_other_hosts(service: DeviceService, address: str, identity: HostIdentity) -> None:
    """Without it only ranks of this host can have the state here, which proxyd is to know."""
    service.identity = identity
    try:
        if not least_tls.IN_FORCE:
            raise OSError("gRPC was loaded before understudy.protos.least_tls: TLS 1.2 would be spoken, too")
        states = ReplicaStateService(service.refusal, service.executor)
        service.remote, service.data_address = serve_state(states, address, identity)
    except OSError as problem:
        sys.stderr.write(f"understudy: other hosts cannot read state here: {problem}\n")


def serve(
    socket: Path, device: str, daemon_socket: str, capability: Capability, proxyd: Identity, grace_s: float,
    data_address: str, identity: HostIdentity | None, shared: Path | None, *, exact: str = "off",
    own_collectives: bool = False,
) -> None:  # fmt: skip
    """Run one device server until it is told to end, or its guardian finds that nobody needs it. Does not
    return.  `exact`: what --exact says; on processors nothing is to be done for it.  `own_collectives`: see
    backends.py.
    """
    _server.set_exact(exact)
    on_processors = capability.driver == "cpu"
    if on_processors:
        _server.keep_freed_memory()
    os.environ.update(ENVIRONMENT)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for proxyd, which ends us in good order
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent to a stopped process when the spawner ends
    guardian = Guardian(socket, proxyd, grace_s)
    channel = daemon_channel(daemon_socket)
    service = DeviceService(channel, capability, guardian, data_address, own_collectives=own_collectives)
    service.device = device
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=MESSAGE_LIMIT)
    rpc.add_DeviceServerServicer_to_server(service, server)
    if not socket.parent.is_dir():
        os._exit(1)  # proxyd has ended meanwhile, and said why
    previous = os.umask(0o177)
    server.add_insecure_port(f"unix:{socket}")
    os.umask(previous)
    if identity is not None:
        _serve_other_hosts(service, data_address, identity)
        service.shared = SharedDirectory(shared, identity.host) if shared is not None else None
    server.start()
    if on_processors:
        _server.touch_memory(READY_BYTES)
    stop.wait()
    server.stop(grace=None)
    os._exit(0)  # executor and communicator threads hold nothing that outlives the process
