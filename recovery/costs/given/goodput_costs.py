"""What goodput.py must be told: costs that somebody measured, as JSON; every mistake becomes one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class BadCosts(ValueError):
    """The file cannot be used; its text is the sentence to print."""


class Persisting(Enum):
    """How writing a snapshot goes together with training."""

    STALLS = "stalls"
    """Training stands still meanwhile: torch.save, GPM."""
    ONE_AT_A_TIME = "one-at-a-time"
    """It goes on until the next one is due: CheckFreq, Gemini, dcp.async_save."""
    CONCURRENT = "concurrent"
    """It goes on while up to `in_flight` are under way: PCcheck, Understudy."""


class Keeping(Enum):
    """Where snapshots are."""

    STORAGE = "storage"
    """It outlives every device."""
    PEER_MEMORY = "peer-memory"
    """With the device that took it and the next one: Gemini."""


@dataclass(frozen=True)
class InPlace:
    """Going on without a snapshot: seconds until training is where it was, redone work included."""

    replica_s: float
    """After losing devices, if every shard has one left."""
    join_s: float
    """After gaining devices."""


@dataclass(frozen=True)
class Policy:
    """One way of taking snapshots, measured on the workload."""

    name: str
    persists: Persisting
    keeps_in: Keeping
    in_flight: int
    """[N]; 1 unless concurrent."""
    write_s: float
    """[T_w] from the begin of copying one until it is durable, with `in_flight` under way."""
    load_s: float
    """[l] from having the storage until training goes on."""
    reattach_s: float
    """Until there are devices with that storage; the paper measured about 5.5 and leaves it out."""
    slowdown: Mapping[int, float]
    """Interval [f] in steps -> time of a step, stalls included, over that without snapshots; 1 or more."""
    in_place: InPlace | None
    """None: every change goes back to a snapshot."""


@dataclass(frozen=True)
class Costs:
    """A file of them."""

    measured: bool
    """False: an example, and everything made of it says so."""
    origin: str
    """Who measured what, where and when."""
    step_s: float
    """[t] without snapshots."""
    shards: int
    """Devices that hold the state together: device i holds shard i modulo this; the others are replicas."""
    policies: tuple[Policy, ...]


def read_costs(path: Path) -> Costs:
    """Raises BadCosts."""
    try:
        content = json.loads(path.read_text())
    except OSError as problem:
        raise BadCosts(f"{path} cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise BadCosts(f"{path} is no JSON: {problem}") from problem
    try:
        return parse_costs(content)
    except BadCosts as problem:
        raise BadCosts(f"{path}: {problem}") from problem


def parse_costs(content: Any) -> Costs:
    """What JSON gave, as costs.  Raises BadCosts naming the place, such as policies.gpm.load_s."""
    top = _Fields("", content, {"measured", "origin", "step_s", "shards", "policies"})
    measured, origin = top.value["measured"], top.value["origin"]
    if not isinstance(measured, bool):
        raise BadCosts("measured must be true, or false for an example")
    if not isinstance(origin, str) or not origin.strip():
        raise BadCosts("origin must say who measured what, where and when")
    policies = top.value["policies"]
    if not isinstance(policies, dict) or not policies:
        raise BadCosts("policies must hold at least one, by its name")
    parsed = tuple(_policy(name, entry) for name, entry in policies.items())
    return Costs(measured, origin, top.seconds("step_s", least=1e-9), top.count("shards"), parsed)


POLICY_FIELDS = {
    "persists", "keeps_in", "in_flight", "write_s", "load_s", "reattach_s", "slowdown", "in_place"
}  # fmt: skip


def _policy(name: str, entry: Any) -> Policy:
    where = f"policies.{name}"
    fields = _Fields(where, entry, POLICY_FIELDS)
    persists = Persisting(fields.one_of("persists", Persisting))
    in_flight = fields.count("in_flight")
    if in_flight > 1 and persists is not Persisting.CONCURRENT:
        raise BadCosts(f"{where}.in_flight is {in_flight}: only concurrent ones can have more than 1")
    return Policy(
        name,
        persists,
        Keeping(fields.one_of("keeps_in", Keeping)),
        in_flight,
        fields.seconds("write_s"),
        fields.seconds("load_s"),
        fields.seconds("reattach_s"),
        _slowdown(f"{where}.slowdown", fields.value["slowdown"]),
        _in_place(f"{where}.in_place", fields.value["in_place"]),
    )


def _slowdown(where: str, entry: Any) -> Mapping[int, float]:
    if not isinstance(entry, dict) or not entry:
        raise BadCosts(f'{where} must map intervals to factors, such as {{"10": 1.03}}')
    found = {}
    for text, factor in entry.items():
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise BadCosts(f"{where}: {text!r} is no interval in steps")
        found[int(text)] = _number(f"{where}.{text}", factor, least=1.0)
    return dict(sorted(found.items()))


def _in_place(where: str, entry: Any) -> InPlace | None:
    if entry is None:
        return None
    fields = _Fields(where, entry, {"replica_s", "join_s"})
    return InPlace(fields.seconds("replica_s"), fields.seconds("join_s"))


class _Fields:
    """One JSON object that must have exactly the expected fields."""

    def __init__(self, where: str, value: Any, expected: set[str]) -> None:
        self._prefix = f"{where}." if where else ""
        if not isinstance(value, dict):
            raise BadCosts(f"{where or 'the file'} must be an object with {', '.join(sorted(expected))}")
        for problem, names in (("is missing", expected - set(value)), ("is unknown", set(value) - expected)):
            for name in sorted(names):
                raise BadCosts(f"{self._prefix}{name} {problem}; --example-costs shows what is expected")
        self.value: dict[str, Any] = value

    def seconds(self, name: str, least: float = 0.0) -> float:
        return _number(self._prefix + name, self.value[name], least)

    def count(self, name: str) -> int:
        value = self.value[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadCosts(f"{self._prefix}{name} is {value!r}: it must be a whole number, 1 or more")
        return value

    def one_of(self, name: str, choices: type[Enum]) -> str:
        known = [choice.value for choice in choices]
        value = self.value[name]
        if value not in known:
            raise BadCosts(f"{self._prefix}{name} is {value!r}: it must be {' or '.join(known)}")
        return str(value)


def _number(where: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise BadCosts(f"{where} is {value!r}: it must be a number, {least:g} or more")
    return float(value)


# ------------------------------------------------------------------ an example
def example() -> dict[str, Any]:
    """What a file looks like.  Nothing in it was measured: round numbers to show the schema and the tool."""

    def policy(
        persists: Persisting,
        slowdowns: list[float],
        load_s: float = 20,
        write_s: float = 40,
        in_flight: int = 1,
        keeps_in: Keeping = Keeping.STORAGE,
        in_place: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        return {
            "persists": persists.value,
            "keeps_in": keeps_in.value,
            "in_flight": in_flight,
            "write_s": write_s,
            "load_s": load_s,
            "reattach_s": 5 if keeps_in is Keeping.STORAGE else 0,
            "slowdown": dict(zip(("1", "10", "25", "50", "100", "250"), slowdowns, strict=True)),
            "in_place": in_place,
        }

    stalling = [41.0, 5.0, 2.6, 1.8, 1.4, 1.16]
    one = [40.0, 4.0, 1.6, 1.05, 1.03, 1.01]
    concurrent = [20.0, 2.0, 1.05, 1.03, 1.02, 1.01]
    return {
        "measured": False,
        "origin": "EXAMPLE ONLY, nothing was measured: round numbers that show what a file looks like",
        "step_s": 1.0,
        "shards": 4,
        "policies": {
            "torch_save": policy(Persisting.STALLS, stalling),
            "gpm": policy(Persisting.STALLS, [1 + 0.75 * (s - 1) for s in stalling], write_s=30),
            "checkfreq": policy(Persisting.ONE_AT_A_TIME, one),
            "dcp_async": policy(Persisting.ONE_AT_A_TIME, one),
            "gemini": policy(
                Persisting.ONE_AT_A_TIME, one, load_s=10, keeps_in=Keeping.PEER_MEMORY
            ),
            "pccheck": policy(Persisting.CONCURRENT, concurrent, in_flight=2),
            "understudy": policy(
                Persisting.CONCURRENT, concurrent, in_flight=2, in_place={"replica_s": 2, "join_s": 5}
            ),
        },
    }  # fmt: skip
