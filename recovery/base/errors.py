"""Sentences that end a command, and the exit status that each kind of them means."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """How our commands end; proxyrun passes on its command's own status where that failed."""

    DONE = 0
    FOUND_BAD = 1
    """It did its work, and what it found is not as it should be."""
    USAGE = 2
    """What the user wrote cannot be done."""
    NOBODY_ANSWERS = 3
    """Whoever should be asked is not there: proxyd, etcd."""
    REFUSED = 4
    """It could be asked for, and was refused or failed."""


class ForTheUser(Exception):
    """Its text is the sentence to print, and nothing else is."""

    status = ExitStatus.REFUSED


class BadInput(ForTheUser, ValueError):
    """Something the user wrote is wrong."""

    status = ExitStatus.USAGE


class Failure(ForTheUser, RuntimeError):
    """It was refused, or has failed."""


class Refused(RuntimeError):
    """What proxyd was asked for cannot be granted; its text is the sentence for the user."""


class NobodyAnswers(Failure):
    """Whoever should be asked is not there."""

    status = ExitStatus.NOBODY_ANSWERS
