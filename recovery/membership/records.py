"""What hosts write down for each other, and where.  Whatever is read may have been written by anybody."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.settings import is_name

VERSION = 1
"""Of HostRecord, HostAbsence, JobLeader and JobOwner; others are not read."""
LARGEST = 1 << 20
"""Bytes of one of them."""

Record = TypeVar("Record", pb.HostRecord, pb.HostAbsence, pb.JobLeader, pb.JobOwner)


class BadRecord(ValueError):
    """It makes no sense; its text says why."""


class Keys:
    """A cluster's keys: below `hosts` each has `record`, under its lease `alive`, behind its end `absent`."""

    def __init__(self, cluster: str) -> None:
        self.hosts = f"understudy/{cluster}/hosts/"

    def record(self, host: str) -> str:
        """Its HostRecord; stays when the host goes without leave."""
        return f"{self.hosts}{host}/record"

    def alive(self, host: str) -> str:
        """The instance of its proxyd, for as long as the lease lasts."""
        return f"{self.hosts}{host}/alive"

    def absent(self, host: str) -> str:
        """Since when it gives no sign: HostAbsence."""
        return f"{self.hosts}{host}/absent"

    def split(self, key: str) -> tuple[str, str]:
        """A key below `hosts` -> (host, "record", "alive" or "absent"); two empty strings for another."""
        host, _, kind = key.removeprefix(self.hosts).partition("/")
        known = key.startswith(self.hosts) and is_name(host) and kind in ("record", "alive", "absent")
        return (host, kind) if known else ("", "")


def written(record: Message) -> bytes:
    """As JSON: an operator may have to read it with etcd's own tools."""
    return json_format.MessageToJson(record, indent=None).encode()


def read(raw: bytes, kind: type[Record]) -> Record:
    """Raises BadRecord."""
    if len(raw) > LARGEST:
        raise BadRecord(f"it has {len(raw)} bytes, more than {LARGEST}")
    try:
        plain = json.loads(raw)
        if not isinstance(plain, dict):
            raise ValueError("no object")
        record = json_format.ParseDict(plain, kind(), ignore_unknown_fields=True, max_recursion_depth=8)
    except (ValueError, json_format.ParseError, RecursionError) as problem:
        raise BadRecord(f"it is not JSON of a {kind.DESCRIPTOR.name}") from problem
    if record.version != VERSION:
        raise BadRecord(f"it has version {record.version}; this proxyd reads {VERSION}")
    if not _is_printable(record):
        raise BadRecord("it has characters that cannot be shown")
    return record


def _is_printable(message: Any) -> bool:
    """Whether a terminal can be shown all of its text."""
    for _, value in message.ListFields():
        for one in value if isinstance(value, (list, tuple)) or hasattr(value, "append") else [value]:
            if isinstance(one, str) and not one.isprintable():
                return False
            if isinstance(one, Message) and not _is_printable(one):
                return False
    return True
