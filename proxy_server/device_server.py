"""One device server: the C++ executor and the gRPC service through which proxyd steers it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc

from protos import control_pb2 as pb
from protos import control_pb2_grpc as rpc
from proxy_server import _server
from proxy_server.backends import BackendFactory
from proxy_server.capability import Capability
from proxy_server.rendezvous_store import RendezvousGate

CHUNK_BYTES = 2 << 20
"""Of state in one message from replica to new server."""

NO_CONTENT = 2**64 - 1
"""Offset of a chunk that says: this buffer's content was not kept here."""

PR_SET_PDEATHSIG = 1
MESSAGE_LIMIT = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: proxyd's death must leave nothing behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


class DeviceService(rpc.DeviceServerServicer):
    """Maps requests to the executor. Steering calls are serialised; reads of state may overlap."""

    def __init__(self, daemon: grpc.Channel, capability: Capability) -> None:
        self._capability = capability
        self._gate = RendezvousGate()
        self._factory = BackendFactory(daemon, capability.driver, self._gate)
        self._daemon = rpc.DaemonStub(daemon)
        self._steering = threading.Lock()
        self._attached: pb.AttachRequest | None = None
        self._generation = 0
        self.device = ""
        self.executor = _server.Executor(self._factory)
        threading.Thread(target=self._report_faults, name="faults", daemon=True).start()

    def _report_faults(self) -> None:
        while True:
            fault = self.executor.wait_for_fault(60_000)
            attached = self._attached
            if fault is None or attached is None:
                continue
            message, record_index = fault
            with contextlib.suppress(grpc.RpcError):  # a dead proxyd needs no report
                self._daemon.ReportFault(
                    pb.FaultReport(
                        job=attached.job,
                        rank=attached.rank,
                        generation=self._generation,
                        message=message,
                        record_index=record_index,
                    )
                )

    # ------------------------------------------------------------------ service
    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthReply:
        return pb.HealthReply(
            pid=os.getpid(),
            state=self.executor.state,
            cursor_index=self.executor.cursor_index,
            capability=self._capability.message(),
            torch_version=_server.TORCH_VERSION,
        )

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        with self._steering:
            try:
                self._factory.job = request.job
                self._factory.forget()
                self._gate.open()
                self._generation = request.generation
                self._attached = request
                self.executor.attach(
                    request.log_directory,
                    device=self.device or f"{self._capability.driver}:0",
                    threads=request.threads,
                    protect=request.policy.protect,
                    optimizer_preimages=request.policy.optimizer_preimages,
                    generation=request.generation,
                )
                if request.run:
                    self.executor.resume()
            except Exception as error:  # noqa: BLE001 - whatever it is, proxyd must hear of it
                return pb.AttachReply(error=f"{type(error).__name__}: {error}")
            return pb.AttachReply()

    def Park(self, request: pb.ParkRequest, context: grpc.ServicerContext) -> pb.ParkReply:
        self._gate.cancel()
        with self._steering:
            try:
                self.executor.park()
            except Exception as error:  # noqa: BLE001
                return pb.ParkReply(error=f"{type(error).__name__}: {error}")
            return pb.ParkReply(cursor_index=self.executor.cursor_index, commit=self.executor.commit)

    def Rewind(self, request: pb.RewindRequest, context: grpc.ServicerContext) -> pb.RewindReply:
        with self._steering:
            try:
                return pb.RewindReply(bytes=self.executor.rewind(request.commit))
            except Exception as error:  # noqa: BLE001
                return pb.RewindReply(error=f"{type(error).__name__}: {error}")

    def Restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext) -> pb.RestoreReply:
        begin = time.monotonic()
        with self._steering:
            try:
                shadow_bytes = self.executor.restore(request.commit)
                copied = sum(self._copy_from(source) for source in request.sources)
                self.executor.complete_restore(
                    [(copy.handle, copy.digest) for source in request.sources for copy in source.copies]
                )
            except Exception as error:  # noqa: BLE001
                return pb.RestoreReply(error=f"{type(error).__name__}: {error}")
        return pb.RestoreReply(
            copied_bytes=copied, shadow_bytes=shadow_bytes, seconds=time.monotonic() - begin
        )

    def _copy_from(self, source: pb.ReplicaSource) -> int:
        wanted: dict[int, list[int]] = defaultdict(list)
        for copy in source.copies:
            wanted[copy.source_handle].append(copy.handle)
        copied = 0
        with grpc.insecure_channel(source.address, options=MESSAGE_LIMIT) as channel:
            request = pb.ReadStateRequest(handles=list(wanted))
            for chunk in rpc.DeviceServerStub(channel).ReadState(request, timeout=600):
                for handle in wanted[chunk.handle]:
                    if chunk.offset == NO_CONTENT:
                        self.executor.mark_lost(handle)
                    else:
                        self.executor.adopt_replica(handle, chunk.offset, chunk.data)
                        copied += len(chunk.data)
        return copied

    def ReadState(
        self, request: pb.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StateChunk]:
        for handle in request.handles:
            if not self.executor.has_content(handle):
                yield pb.StateChunk(handle=handle, offset=NO_CONTENT)
                continue
            total = self.executor.buffer_bytes(handle)
            for offset in range(0, total, CHUNK_BYTES):
                data = self.executor.read_state(handle, offset, min(CHUNK_BYTES, total - offset))
                yield pb.StateChunk(handle=handle, offset=offset, data=data)

    def RebuildCommunicators(
        self, request: pb.RebuildRequest, context: grpc.ServicerContext
    ) -> pb.RebuildReply:
        begin = time.monotonic()
        with self._steering:
            try:
                self._factory.forget()
                self._gate.open()
                self._generation = request.generation
                rebuilt = self.executor.rebuild(request.generation)
            except Exception as error:  # noqa: BLE001
                return pb.RebuildReply(error=f"{type(error).__name__}: {error}")
        return pb.RebuildReply(communicators=rebuilt, seconds=time.monotonic() - begin)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> pb.ResumeReply:
        with self._steering:
            try:
                self.executor.resume()
            except Exception as error:  # noqa: BLE001
                return pb.ResumeReply(error=f"{type(error).__name__}: {error}")
            return pb.ResumeReply()

    def SetReplicated(
        self, request: pb.ReplicatedRequest, context: grpc.ServicerContext
    ) -> pb.ReplicatedReply:
        self.executor.set_replicated(list(request.handles))
        return pb.ReplicatedReply()

    def Detach(self, request: pb.DetachRequest, context: grpc.ServicerContext) -> pb.DetachReply:
        self._gate.cancel()
        with self._steering:
            try:
                self.executor.detach()
                self._attached = None
                self._factory.forget()
            except Exception as error:  # noqa: BLE001
                return pb.DetachReply(error=f"{type(error).__name__}: {error}")
            return pb.DetachReply(spent=_server.has_foreign_libraries())


def serve(socket: Path, device: str, daemon_socket: str, capability: Capability) -> None:
    """Run one device server until its parent dies or it is told to end. Does not return."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for proxyd, which ends us in good order
    daemon = grpc.insecure_channel(f"unix:{daemon_socket}", options=MESSAGE_LIMIT)
    service = DeviceService(daemon, capability)
    service.device = device
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=MESSAGE_LIMIT)
    rpc.add_DeviceServerServicer_to_server(service, server)
    previous = os.umask(0o177)
    server.add_insecure_port(f"unix:{socket}")
    os.umask(previous)
    server.start()
    stop.wait()
    server.stop(grace=None)
    os._exit(0)  # executor and communicator threads hold nothing that outlives the process
