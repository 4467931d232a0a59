"""Whether another host can go on with a worker's process and state, from what hosts tell of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.protos import control_pb2 as pb
from understudy.recovery.migration.places import Place
from understudy.recovery.planning.agreement import HostState

MOST_NAMED = 4
"""Processor features told of, of those that differ."""


def why_not(here: pb.HostRecord, there: pb.HostRecord) -> str:
    """Empty, or a sentence with the first thing in which they differ and both values."""
    for what, of in _EQUAL.items():
        ours, theirs = of(here), of(there)
        if ours != theirs:
            return f"{there.name} has {what} {theirs or 'none'}, and {here.name} has {ours or 'none'}"
    mine, other = set(here.processor_features), set(there.processor_features)
    if mine != other:
        only = [_only(here.name, mine - other), _only(there.name, other - mine)]
        return (
            f"results would have other bits on {there.name} ({there.processor}) than on {here.name} "
            f"({here.processor}): {'; '.join(filter(None, only))}"
        )
    return ""


def no_room(there: pb.HostRecord, device: str) -> str:
    """Empty, or a sentence: the device named, or any, cannot be had there."""
    known = {one.spec: one.state for one in there.node.devices}
    if device and device not in known:
        return f"{there.name} has no device {device}; it has: {', '.join(known) or 'none'}"
    if device and known[device] != "idle":
        return f"{device} of {there.name} is {known[device]}, not idle"
    if "idle" not in known.values():
        return f"{there.name} has no free device"
    return ""


def refusal(place: Place, hosts: pb.HostList) -> str:
    """Why nothing can go to a place of another host; empty: as far as is known it can."""
    known = {one.record.name: one for one in hosts.hosts}
    here = next((one for one in hosts.hosts if one.here), None)
    if place.host not in known:
        return f"there is no host {place.host}; known are: {', '.join(sorted(known)) or 'none'}"
    there = known[place.host]
    if there.state != HostState.ALIVE:
        return f"{place.host} is {there.state}" + (f": {there.why}" if there.why else "")
    if here is None:
        return f"this host ({hosts.membership.host}) is not registered, so nobody can say whether they fit"
    return why_not(here.record, there.record) or no_room(there.record, place.device)


def may_pass(place: Place, hosts: pb.HostList) -> bool:
    """Whether a refusal is for want of a device only: what a host tells of them is up to a second old."""
    known = {one.record.name: one for one in hosts.hosts}
    here = next((one for one in hosts.hosts if one.here), None)
    there = known.get(place.host)
    if here is None or there is None or there.state != HostState.ALIVE or why_not(here.record, there.record):
        return False
    return not place.device or any(one.spec == place.device for one in there.record.node.devices)


def _only(host: str, features: set[str]) -> str:
    if not features:
        return ""
    rest = len(features) - MOST_NAMED
    named = ", ".join(sorted(features)[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    return f"only {host} has {named}"


def _architecture(record: Any) -> str:
    return str(record.kernel.rpartition(" ")[2])


def _driver(record: Any) -> str:
    return ", ".join(sorted({device.driver for device in record.node.devices}))


def _gpu(record: Any) -> str:
    """On the cpu driver any device is as good as another."""
    of = record.node.capability
    return f"{of.device_name}, {of.major}.{of.minor}" if of.driver == "cuda" else ""


def _criu(record: Any) -> str:
    """Images of one minor release are not for another."""
    return ".".join(record.criu.split(".")[:2])


_EQUAL: dict[str, Callable[[Any], str]] = {
    "devices of the kind": _driver,
    "GPUs": _gpu,
    "--exact": lambda record: str(record.node.exact),
    "--collectives": lambda record: str(record.node.collectives),
    "PyTorch": lambda record: str(record.node.torch_version),
    "a processor of the architecture": _architecture,
    "CRIU": _criu,
}
"""What has to be the same: the text before a value, and where it is."""
