"""`recoveryctl hosts`: who there is, as the proxyd that is asked sees it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer
from google.protobuf import json_format
from rich.table import Table
from rich.text import Text

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Failure
from understudy.recovery.run.asking import SocketOption, ask
from understudy.recovery.text.tables import account_of_trouble, make_console, moment


def hosts(
    socket: SocketOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    forget: Annotated[
        str, typer.Option(metavar="HOST", help="Take one off the list that is lost and does not come back.")
    ] = "",
) -> None:
    """Hosts of the cluster: their last sign, devices, spares and jobs."""
    if forget:
        request = pb.ForgetHostRequest(name=forget)
        reply = ask(socket, lambda daemon: daemon.ForgetHost(request, timeout=20))
        if reply.error:
            raise Failure(reply.error)
        typer.echo(reply.detail)
        return
    found = ask(socket, lambda daemon: daemon.ListHosts(pb.ListHostsRequest(), timeout=20))
    if as_json:
        plain = json_format.MessageToDict(
            found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        typer.echo(json.dumps(plain, indent=2))
        return
    console = make_console()
    console.print(_table(found))
    for host in found.hosts:
        if host.why:
            console.print(Text(f"{host.record.name} is {host.state}: {host.why}"))
    if found.membership.trouble:
        console.print(Text(account_of_trouble(found.membership)))
    for problem in found.problems:
        console.print(Text(problem), style="yellow")


def _table(found: Any) -> Table:
    membership = found.membership
    where = f"etcd at {membership.store}" if membership.store else "no --etcd: this host is by itself"
    table = Table(title=f"cluster {membership.cluster}, {where}")
    for heading in (
        "host",
        "state",
        "last sign",
        "address",
        "devices",
        "spares",
        "jobs",
        "PyTorch",
        "kernel",
    ):
        table.add_column(heading)
    for host in found.hosts:
        record = host.record
        table.add_row(
            record.name + (" (here)" if host.here else ""),
            host.state + (f" since {moment(host.since_ms)}" if host.since_ms else ""),
            f"{host.sign_age_s:.0f} s ago" if host.sign_age_s >= 0 else "–",
            record.address or "–",
            _devices(record.node.devices), str(record.node.spares), _jobs(record.ranks),
            record.node.torch_version, record.kernel,
        )  # fmt: skip
    return table


def _devices(devices: Any) -> str:
    """`2 cpu: 1 leased, 1 idle`."""
    kinds = Counter(device.driver for device in devices)
    states = Counter(device.state for device in devices)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return (
        f"{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}: {told}" if devices else "–"
    )


def _jobs(ranks: Any) -> str:
    """`char (ranks 0, 1 of 4)`."""
    told: dict[str, list[str]] = {}
    for rank in sorted(ranks, key=lambda rank: (rank.job, rank.rank)):
        told.setdefault(f"{rank.job[:8]} of {rank.world}", []).append(str(rank.rank))
    jobs = [
        f"{job.rsplit(' of ', 1)[0]} (ranks {', '.join(ranks)} of {job.rsplit(' of ', 1)[1]})"
        for job, ranks in told.items()
    ]
    return "; ".join(jobs) or "–"
