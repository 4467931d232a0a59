"""What a worker that comes from another host brings along of its job; it is checked before it is believed."""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import Refused
from understudy.recovery.membership.job_leadership import TOKEN_BYTES
from understudy.recovery.membership.settings import MOST_HOSTS_OF_A_JOB, is_name

_DEVICE = re.compile(r"(?:[a-z]{1,16}:[0-9]{1,4})?")
"""Empty: any."""


def read_mark(raw: bytes) -> pb.SpanMark:
    """Raises Refused."""
    try:
        mark = pb.SpanMark.FromString(raw)
    except DecodeError:
        raise Refused("what is told of its job cannot be read") from None
    wrong = {
        "leader": not is_name(mark.leader),
        "number of hosts": not 1 <= mark.hosts <= MOST_HOSTS_OF_A_JOB,
        "token": len(mark.token) != TOKEN_BYTES,
        "device": _DEVICE.fullmatch(mark.device) is None,
    }
    if any(wrong.values()):
        raise Refused(f"the {next(what for what in wrong if wrong[what])} that is told of its job is none")
    return mark
