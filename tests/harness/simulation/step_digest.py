"""What a simulated optimizer step does, in one number, as proxy_server/csrc/executor/step_digest.h has it."""

from __future__ import annotations

from simulation.log import Commit
from simulation.programs import Do, Record, mix


class StepDigest:
    """Of one server."""

    def __init__(self) -> None:
        self.active = False
        self.value = 0
        """0: not to be known."""
        self._contents: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def begin(self, commit: Commit) -> None:
        """A step begins behind its newest commit."""
        self.active, self.value = True, 1
        self._contents = {row.handle: row.digest or 0 for row in commit.rows}
        self._numbers = {}

    def add(self, record: Record) -> None:
        """A record of the step."""
        do = record[0]
        if do is Do.MIX:
            names = [word for handle in (record[1], *record[2]) for word in self._name(handle)]
            self._mix(do, *names, record[3])
        elif do in (Do.NEW, Do.RANDOM):
            self._mix(do, *self._name(record[1]), *record[2:])
        elif do in (Do.JOIN, Do.LEAVE, Do.COLLECTIVE, Do.SEND, Do.RECEIVE):
            self.value = 0

    def end(self) -> None:
        """The step ended."""
        self.active = False

    def take(self) -> int:
        """For the commit behind it."""
        value, self.value = (0 if self.active else self.value), 0
        return value

    def _name(self, handle: int) -> tuple[int, ...]:
        """By first use, and with what it held where the step began."""
        if handle in self._numbers:
            return (self._numbers[handle],)
        self._numbers[handle] = len(self._numbers)
        return self._numbers[handle], self._contents.get(handle, 0)

    def _mix(self, *parts: int) -> None:
        if self.value:
            self.value = mix(self.value, *parts) or 1
