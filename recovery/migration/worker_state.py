"""Where a worker is that goes from host to host, and what brings it where: one table, for both ends.

    RUNNING ──dump──▶ DUMPED ──release──▶ RELEASED ──remove──▶ REMOTE
       ◀───────────────resume─────────────────┘                  ┊ on the other host
    RUNNING ◀──resume── RESTORED ◀──restore── RECEIVED ◀──receive── ARRIVING

Each host says where the worker is *there*: the init of its namespace, which knows its processes
(relay/whereabouts.py), and the proxyd, which knows as well what is on its way (incoming/incoming_worker.py)
or has left (relay/outgoing_workers.py).  At most one copy runs: it is resumed on another host only after it
was released on this one, and then no passing of time resumes it here, only an order.

Whether a rank is drained, has lost its device or its host, or its process is moved in place, only differs in
who gives these orders.  A worker that comes from an image goes through the lower row alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class WorkerState(StrEnum):
    """Where it is, as seen from one host."""

    RUNNING = "running"
    DUMPED = "dumped"
    """Stopped, and its images are written; it goes on by itself if nobody says what becomes of it."""
    RELEASED = "released"
    """Stopped, and it may run on another host."""
    REMOTE = "remote"
    """It is not here."""
    ARRIVING = "arriving"
    RECEIVED = "received"
    """All of it has come; there is no process yet."""
    RESTORED = "restored"
    """Stopped; it ends by itself if nobody lets it run."""
    ENDED = "ended"


class Event(StrEnum):
    """What happens to it.  The name of an order to its init, where it is one."""

    MOVE = "move"
    """In place: dumped, and restored at once."""
    DUMP = "dump"
    RELEASE = "release"
    RESUME = "resume"
    REMOVE = "remove"
    """What is left of it here is ended: it runs on another host, or was never let run here."""
    RECEIVE = "receive"
    RESTORE = "restore"
    END = "end"
    """Its processes here have ended, or whoever watched them."""
    DISMISS = "dismiss"
    """It is no business of this host's any more: nobody wants it, proxyd stops, or its own relay has it."""
    GIVE_UP = "give-up"
    """It is not to be found any more."""


_S, _E = WorkerState, Event
NEXT: Mapping[WorkerState, Mapping[Event, WorkerState]] = {
    # To let run what runs changes nothing: whoever orders it may come when patience has ended.
    _S.RUNNING: {
        _E.MOVE: _S.RUNNING, _E.DUMP: _S.DUMPED, _E.RESUME: _S.RUNNING, _E.END: _S.ENDED,
        _E.DISMISS: _S.REMOTE,
    },
    _S.DUMPED: {
        _E.RELEASE: _S.RELEASED, _E.RESUME: _S.RUNNING, _E.REMOVE: _S.REMOTE, _E.END: _S.ENDED,
        _E.DISMISS: _S.REMOTE,
    },
    # That its processes here have ended says nothing about the other host.
    _S.RELEASED: {
        _E.RESUME: _S.RUNNING, _E.REMOVE: _S.REMOTE, _E.END: _S.REMOTE, _E.DISMISS: _S.REMOTE,
    },
    # An init knows of no arriving: it hears of a worker when that is to be restored.
    _S.REMOTE: {
        _E.RESTORE: _S.RESTORED, _E.REMOVE: _S.REMOTE, _E.END: _S.REMOTE, _E.DISMISS: _S.REMOTE,
        _E.GIVE_UP: _S.ENDED,
    },
    _S.ARRIVING: {_E.RECEIVE: _S.RECEIVED, _E.DISMISS: _S.REMOTE},
    _S.RECEIVED: {_E.RESTORE: _S.RESTORED, _E.DISMISS: _S.REMOTE},
    _S.RESTORED: {_E.RESUME: _S.RUNNING, _E.REMOVE: _S.REMOTE, _E.END: _S.REMOTE, _E.DISMISS: _S.REMOTE},
    _S.ENDED: {_E.END: _S.ENDED, _E.DISMISS: _S.ENDED, _E.GIVE_UP: _S.ENDED},
}  # fmt: skip

WITHOUT_ORDERS: Mapping[WorkerState, Event] = {_S.DUMPED: _E.RESUME, _S.RESTORED: _E.REMOVE}
"""What happens once whoever gave the last order has not come back in time."""


class NoSuchStep(ValueError):
    """Its text is a sentence."""


def after(state: WorkerState, event: Event) -> WorkerState:
    """Where the worker is then; raises NoSuchStep if that cannot happen to it there."""
    found = NEXT[state].get(event)
    if found is None:
        raise NoSuchStep(f"the worker is {state}, so {event.value!r} makes no sense")
    return found


@dataclass(frozen=True)
class Away:
    """Where a worker went, or may have gone, as is written down at the host that it left."""

    host: str
    move: str
    """By which it went; empty: it has gone on from where it was sent."""
    sure: bool
    """It runs there; else that host alone knows whether it does, and here it is released."""
