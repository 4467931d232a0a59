"""This node as proxyd tells of it: devices, who holds them, and which ranks run."""

from __future__ import annotations

import os

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.host_agent import HostAgent
from understudy.recovery.host.servers import ServerPool

DRAINED = "nobody gets it until recoveryctl drain --undo"


def describe_node(agent: HostAgent, pool: ServerPool) -> pb.Node:
    """As it is now, but for its membership."""
    return pb.Node(
        torch_version=agent.installation.torch_version,
        pid=os.getpid(),
        devices=[
            _device(agent, pool, index, name) for index, name in enumerate(agent.settings.devices.names)
        ],
        capability=agent.installation.capability,
        spares=pool.spares(),
        **agent.settings.gpu_ways,
    )


def describe_ranks(agent: HostAgent) -> list[pb.HostRank]:
    """Those that run here, by job."""
    return [
        pb.HostRank(
            job=job.name, rank=session.rank, world=session.world, device=session.device, state=session.state
        )
        for job in agent.jobs.values()
        for session in job.active_sessions()
    ]


def _device(agent: HostAgent, pool: ServerPool, index: int, name: str) -> pb.Device:
    driver = agent.settings.devices.kind
    if index in agent.leases.fenced:
        why = agent.leases.fenced[index]
        return pb.Device(spec=name, index=index, state="failed", rank=-1, driver=driver, note=why)
    holder = agent.leases.holder(index)
    draining = index in agent.leases.draining
    if holder is None and draining:
        return pb.Device(spec=name, index=index, state="drained", rank=-1, driver=driver, note=DRAINED)
    if holder is None:
        state = "failed" if pool.broken else "idle" if pool.ready() else "starting"
        worn = agent.leases.worn.get(index, "")
        return pb.Device(spec=name, index=index, state=state, rank=-1, driver=driver, note=worn)
    state = "recovering" if holder.state == "recovering" else "draining" if draining else "leased"
    to = holder.destination
    note = "" if to is None else f"rank {holder.rank} is to move to {agent.leases.name(to)}"
    return pb.Device(
        spec=name, index=index, state=state, server_pid=holder.server.pid, job=holder.job.name,
        rank=holder.rank, driver=driver, note=note,
    )  # fmt: skip
