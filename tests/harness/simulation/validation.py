"""Validation of a minibatch by a simulated device server: as in proxy_server/csrc/executor/validation.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.collectives import Blocked
from simulation.log import Log

if TYPE_CHECKING:
    from simulation.device import Device

VALIDATION_PATIENCE = 0.5
"""Seconds that what is in flight at the end of a minibatch that is validated is waited for."""
Contents = dict[int, bytes]
"""Handle -> content; the generator's state is under handle -1."""


class ValidationPause(Exception):
    """The first pass is over: stand still until everybody was taken back."""


class Validation:
    """Of one server."""

    def __init__(self) -> None:
        self.active = False
        self.pausing = False
        """Whether the server stands after a first pass."""
        self._step = self._first_step = 0
        self._first: Contents | None = None

    @property
    def has_first(self) -> bool:
        """Whether a first pass is over."""
        return self._first is not None

    def begin(self, log: Log, step: int) -> None:
        """A minibatch begins, or is begun again."""
        self.active = log.validate_step == step and log.validated_step < step
        if step > self._first_step:  # ranks may be taken back to earlier minibatches than this one
            self._first = None
        self._step = step

    def leave_out(self, log: Log) -> None:
        """Nothing is found out about this minibatch."""
        self.active, self._first = False, None
        if log.validate_step == self._step:
            log.validate_step = 0

    def at_end(self, log: Log, now: Contents, drifts: bool) -> bool:
        """The end of the minibatch: whether both passes made the same; raises ValidationPause in between.

        `drifts`: the program has an operator that does not replay.
        """
        self.active = False
        if self._first is None:
            self._first, self._first_step = now, self._step
            self.pausing = True
            raise ValidationPause
        same, self._first = self._first == now, None
        if not same or drifts:
            log.validation_message = "replay differs"
            log.validations_failed += 1
        log.validated_step = self._step
        return same


class Patience:
    """Waits for what is in flight at the end of a minibatch that is validated."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None
        """The record before which something is in flight, and until when that is waited for."""

    def end(self) -> None:
        """Nothing is waited for any more."""
        self._since = None

    def settles(self, device: Device) -> bool:
        """Whether nothing is in flight any more within some patience; raises Blocked meanwhile."""
        since, self._since = self._since, None
        try:
            device.collectives.wait_for_all()
        except Blocked:
            now = device.world.loop.time()
            if since is not None and since[0] == device.index and now >= since[1]:
                return False
            if since is None or since[0] != device.index:
                since = (device.index, now + VALIDATION_PATIENCE)
                device.world.later(VALIDATION_PATIENCE, device.go_on)
            self._since = since
            raise
        return True
