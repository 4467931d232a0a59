"""This node as proxyd tells of it: devices, who holds them, and which ranks run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from understudy.protos import control_pb2 as pb
from understudy.recovery.config.settings import Settings
from understudy.recovery.host.leases import Leases
from understudy.recovery.host.servers import ServerPool
from understudy.recovery.host.spawner import Installation
from understudy.recovery.state.jobs import Job

DRAINED = "nobody gets it until recoveryctl drain --undo"


def describe_node(
    settings: Settings, installation: Installation, leases: Leases, pool: ServerPool
) -> pb.Node:
    """As it is now, but for its membership."""
    driver = settings.devices.kind
    return pb.Node(
        torch_version=installation.torch_version,
        pid=os.getpid(),
        devices=[
            _device(leases, pool, driver, index, name) for index, name in enumerate(settings.devices.names)
        ],
        capability=installation.capability,
        spares=pool.spares(),
        **settings.gpu_ways,
    )


def describe_ranks(jobs: Mapping[str, Job]) -> list[pb.HostRank]:
    """Those that run here, by job."""
    return [
        pb.HostRank(
            job=job.name, rank=session.rank, world=session.world, device=session.device, state=session.state
        )
        for job in jobs.values()
        for session in job.active_sessions()
    ]


def _device(leases: Leases, pool: ServerPool, driver: str, index: int, name: str) -> pb.Device:
    if index in leases.fenced:
        why = leases.fenced[index]
        return pb.Device(spec=name, index=index, state="failed", rank=-1, driver=driver, note=why)
    holder = leases.holder(index)
    draining = index in leases.draining
    if holder is None and draining:
        return pb.Device(spec=name, index=index, state="drained", rank=-1, driver=driver, note=DRAINED)
    if holder is None:
        state = "failed" if pool.broken else "idle" if pool.ready() else "starting"
        worn = leases.worn.get(index, "")
        return pb.Device(spec=name, index=index, state=state, rank=-1, driver=driver, note=worn)
    state = "recovering" if holder.state == "recovering" else "draining" if draining else "leased"
    to = holder.destination
    note = "" if to is None else f"rank {holder.rank} is to move to {leases.name(to)}"
    return pb.Device(
        spec=name, index=index, state=state, server_pid=holder.server.pid, job=holder.job.name,
        rank=holder.rank, driver=driver, note=note,
    )  # fmt: skip
