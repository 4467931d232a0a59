"""Faults ordered on purpose: `kill-server rank=1 step=30 call=120`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput
from understudy.recovery.drills.fault_table import BY_NAME

_EXAMPLE = "write for example 'kill-server rank=1 step=30 call=120'"


@dataclass(frozen=True)
class Drill:
    """Fault `kind` of `rank` just before record `call` of minibatch `step`; step 0 means now."""

    kind: str
    rank: int
    step: int
    call: int

    def __str__(self) -> str:
        when = f"step={self.step} call={self.call}" if self.step else "now"
        return f"{self.kind} rank={self.rank} {when}"

    def message(self) -> pb.Drill:
        """As it travels."""
        return pb.Drill(kind=self.kind, rank=self.rank, step=self.step, call=self.call)


def unknown(kind: str) -> str:
    """What to say of a fault that does not exist."""
    if not kind:
        return f"no fault is named (there are: {', '.join(BY_NAME)})"
    near = difflib.get_close_matches(kind, BY_NAME, n=1)
    return (
        f"unknown drill {kind!r} ({f'is {near[0]} meant? ' if near else ''}there are: {', '.join(BY_NAME)})"
    )


def parse_drill(text: str) -> Drill:
    """Parse the command line's spelling; raises BadInput with a sentence."""
    words = text.split()
    if not words or words[0] not in BY_NAME:
        raise BadInput(f"{unknown(words[0] if words else '')}; {_EXAMPLE}")
    numbers: dict[str, int] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if name not in ("rank", "step", "call") or not equals:
            raise BadInput(f"drill {text!r}: {word!r} is not rank=, step= or call=; {_EXAMPLE}")
        if name in numbers:
            raise BadInput(f"drill {text!r} names {name} twice")
        if not value.isascii() or not value.isdigit():
            raise BadInput(f"drill {text!r}: {name} must be a whole number, not {value!r}")
        numbers[name] = int(value)
    numbers.setdefault("call", 1)
    for name in ("rank", "step"):
        if name not in numbers:
            raise BadInput(f"drill {text!r} does not say which {name}; {_EXAMPLE}")
    for name in ("step", "call"):
        if numbers[name] < 1:
            raise BadInput(f"drill {text!r}: {name} counts from 1")
    if max(numbers.values()) >= 1 << 31:
        raise BadInput(f"drill {text!r}: a number is too large")
    return Drill(words[0], **numbers)
