"""This node as proxyd tells of it: devices, who holds them, and which ranks run."""

from __future__ import annotations

import os

from understudy.recovery.base.control import pb
from understudy.recovery.desk.sessions import Desk
from understudy.recovery.host.servers import ServerPool

DRAINED = "nobody gets it until recoveryctl drain --undo"


def describe_node(desk: Desk, pool: ServerPool) -> pb.Node:
    """As it is now, but for its membership."""
    return pb.Node(
        torch_version=desk.installation.torch_version,
        pid=os.getpid(),
        devices=[_device(desk, pool, index, name) for index, name in enumerate(desk.settings.devices.names)],
        capability=desk.installation.capability,
        spares=pool.spares(),
    )


def describe_ranks(desk: Desk) -> list[pb.HostRank]:
    """Those that run here, by job."""
    return [
        pb.HostRank(
            job=job.name, rank=session.rank, world=session.world, device=session.device, state=session.state
        )
        for job in desk.jobs.values()
        for session in job.active_sessions()
    ]


def _device(desk: Desk, pool: ServerPool, index: int, name: str) -> pb.Device:
    driver = desk.settings.devices.kind
    if index in desk.leases.fenced:
        why = desk.leases.fenced[index]
        return pb.Device(spec=name, index=index, state="failed", rank=-1, driver=driver, note=why)
    holder = desk.leases.holder(index)
    draining = index in desk.leases.draining
    if holder is None and draining:
        return pb.Device(spec=name, index=index, state="drained", rank=-1, driver=driver, note=DRAINED)
    if holder is None:
        state = "failed" if pool.broken else "idle" if pool.ready() else "starting"
        return pb.Device(spec=name, index=index, state=state, rank=-1, driver=driver)
    state = "recovering" if holder.state == "recovering" else "draining" if draining else "leased"
    to = holder.destination
    note = "" if to is None else f"rank {holder.rank} is to move to {desk.leases.name(to)}"
    return pb.Device(
        spec=name, index=index, state=state, server_pid=holder.server.pid, job=holder.job.name,
        rank=holder.rank, driver=driver, note=note,
    )  # fmt: skip
