"""Every command to a device server, on one page: how long it may take, and who may give it.

A command is a message of `device_server.proto`, and its answer is the one that the file pairs it with.  Who
gives it need not know how it travels: `Server.execute` is the same for servers of this host and of others.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from understudy.protos import control_pb2 as pb
from understudy.protos.device_server_pb2 import DESCRIPTOR


class NotDone(Exception):
    """What was to be done was not, or nobody knows; its text is a sentence.

    `late`: no answer came in time, so that whoever was asked may hang.
    """

    def __init__(self, sentence: str, *, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


class NoPlace(RuntimeError):
    """A rank gets no device or no server; its text is a sentence."""


@dataclass(frozen=True)
class Command:
    """How a command is given."""

    method: str
    """Its name, as it travels."""
    within_s: float
    """Seconds in which it is answered, or is taken not to be."""
    across_hosts: bool
    """Whether the leader of a job may give it to servers of other hosts."""
    message: type[Message]
    reply: type[Message]


_METHODS = {one.input_type: one for one in DESCRIPTOR.services_by_name["DeviceServer"].methods}


def _command(message: type[Message], within_s: float, *, across_hosts: bool) -> Command:
    method = _METHODS[message.DESCRIPTOR]
    return Command(method.name, within_s, across_hosts, message, GetMessageClass(method.output_type))


COMMANDS = (
    # What a recovery is made of.
    _command(pb.ParkRequest, 20.0, across_hosts=True),
    _command(pb.AttachRequest, 30.0, across_hosts=True),
    _command(pb.RewindRequest, 120.0, across_hosts=True),
    _command(pb.RestoreRequest, 600.0, across_hosts=True),
    _command(pb.WriteStateRequest, 600.0, across_hosts=True),
    _command(pb.RebuildRequest, 60.0, across_hosts=True),
    _command(pb.ResumeRequest, 20.0, across_hosts=True),
    # A server that is held looks up at its next record.
    _command(pb.HoldRequest, 2.0, across_hosts=True),
    _command(pb.LetGoRequest, 20.0, across_hosts=True),
    # While nothing fails.
    _command(pb.ReplicatedRequest, 10.0, across_hosts=True),
    _command(pb.HealthRequest, 60.0, across_hosts=True),
    # What the agent of its own host has it do.
    _command(pb.TryDeviceRequest, 20.0, across_hosts=False),
    _command(pb.AdoptRequest, 20.0, across_hosts=False),  # it may be in the middle of a rewind
    _command(pb.FollowWorkerRequest, 30.0, across_hosts=False),
)
"""What device servers ask of each other (LocateState, ReadState, CopyState) is none of them."""

_BY_MESSAGE = {one.message: one for one in COMMANDS}
_BY_METHOD = {one.method: one for one in COMMANDS}


def command_of(message: Message) -> Command:
    """Raises KeyError if it is none."""
    return _BY_MESSAGE[type(message)]


def command_named(method: str) -> Command | None:
    """As it came from another host."""
    return _BY_METHOD.get(method)
