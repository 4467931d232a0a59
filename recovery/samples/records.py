"""The lines of a rank's file (proxy_client/samples/lines.py writes them), as anybody may have made them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.durable import json_object

LARGEST = 2**53
LONGEST_TEXT = 300
MOST_SAMPLERS = 8
_DIGEST = re.compile(r"[0-9a-f]{16}")

SampleId = int | str


@dataclass(frozen=True)
class Beginning:
    """A process begins, which is this rank."""

    attempt: int
    restart: int
    rank: int
    world: int
    left_out: int
    """Batches that came before it used its device, and are not written down."""


@dataclass(frozen=True)
class Share:
    """Which positions of all ranks' order are one rank's: `chunk` at a time, in turns, from `skipped` on."""

    replicas: int
    replica: int
    chunk: int
    skipped: int

    def position(self, number: int) -> int:
        """Where the n-th sample stands that this rank had of an epoch, from 0."""
        number += self.skipped
        return (number // self.chunk * self.replicas + self.replica) * self.chunk + number % self.chunk


@dataclass(frozen=True)
class Loader:
    """A loader, as it is iterated for the first time."""

    number: int
    kind: str
    samplers: tuple[str, ...]
    dataset_size: int | None
    batch_size: int | None
    share: Share | None
    may_repeat: bool
    plan: tuple[int, int, int, bool] | None
    """Of a ResumableSampler: size of its data set, global batch, seed, and whether it shuffles."""

    def __str__(self) -> str:
        sampler = self.samplers[-1].rpartition(".")[2] if self.samplers else "no sampler"
        size = "" if self.dataset_size is None else f", {self.dataset_size} samples"
        return f"loader {self.number} ({self.kind.rpartition('.')[2]}, {sampler}{size})"


@dataclass(frozen=True)
class Batch:
    """One that was handed out; without `ids`, nobody knows what was in it."""

    loader: int
    epoch: int
    step: int
    ids: Sequence[SampleId] | None

    @property
    def place(self) -> tuple[int, int, int]:
        return (self.loader, self.epoch, self.step)


@dataclass(frozen=True)
class Content:
    """What a minibatch has brought to the device."""

    minibatch: int
    payloads: int
    bytes: int
    digest: str
    end: bool
    """The script has ended; no optimizer's step came behind this."""


Record = Beginning | Loader | Batch | Content


def parse(line: bytes) -> tuple[int, Record]:
    """Its number in the attempt, and what it says.  Raises ValueError, saying why, for what is no record."""
    fields = json_object(line)
    if "line" not in fields:
        by_script = "attempt" in fields or "hash" in fields
        raise ValueError(
            "it is of a script's own SampleLog, which python -m understudy.data check judges"
            if by_script
            else "it has no number"
        )
    number = _number(fields, "line")
    if "attempt" in fields:
        return number, _beginning(fields)
    if "class" in fields:
        return number, _loader(fields)
    if "minibatch" in fields:
        return number, _content(fields)
    return number, _batch(fields)


def _beginning(fields: Mapping[str, Any]) -> Beginning:
    names = ("attempt", "restart", "rank", "world_size", "left_out")
    found = Beginning(*(_number(fields, name) for name in names))
    if not 0 <= found.rank < found.world <= 1 << 20 or found.attempt < 1 or fields["line"] != 0:
        raise ValueError(f"it is of attempt {found.attempt} and rank {found.rank} of {found.world}")
    return found


def _loader(fields: Mapping[str, Any]) -> Loader:
    samplers = fields.get("samplers")
    if not isinstance(samplers, list) or len(samplers) > MOST_SAMPLERS:
        raise ValueError("its field 'samplers' is no list of a few")
    if not isinstance(may_repeat := fields.get("may_repeat"), bool):
        raise ValueError("its field 'may_repeat' is neither true nor false")
    return Loader(
        _number(fields, "loader"),
        _text(fields.get("class"), "class"),
        tuple(_text(one, "samplers") for one in samplers),
        _perhaps(fields, "dataset_size"),
        _perhaps(fields, "batch_size"),
        _share(fields.get("share")),
        may_repeat,
        _plan(fields.get("plan")),
    )


def _share(value: object) -> Share | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("its field 'share' is none")
    share = Share(*(_number(value, name) for name in ("replicas", "replica", "chunk", "skipped")))
    if not (0 <= share.replica < share.replicas <= 1 << 20) or not 1 <= share.chunk <= 1 << 32:
        raise ValueError("its field 'share' makes no sense")
    return share


def _plan(value: object) -> tuple[int, int, int, bool] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("shuffle"), bool):
        raise ValueError("its field 'plan' is none")
    if type(seed := value.get("seed")) is not int or abs(seed) > 2**64:
        raise ValueError("its field 'plan' has no seed")
    size, batch = _number(value, "dataset_size"), _number(value, "global_batch")
    if not 1 <= batch <= size:
        raise ValueError("its field 'plan' makes no sense")
    return size, batch, seed, value["shuffle"]


def _batch(fields: Mapping[str, Any]) -> Batch:
    loader, epoch, step = (_number(fields, name) for name in ("loader", "epoch", "step"))
    ids = fields.get("ids")
    if ids is None:
        return Batch(loader, epoch, step, None)
    if not isinstance(ids, list) or not all(type(one) in (int, str) for one in ids):
        raise ValueError("its field 'ids' is no list of numbers and texts")
    if _number(fields, "count") != len(ids):
        raise ValueError("its field 'count' is not the number of its ids")
    return Batch(loader, epoch, step, _compact(ids))


def _compact(ids: list[SampleId]) -> Sequence[SampleId]:
    try:
        return array("q", ids)  # type: ignore[type-var]
    except (TypeError, OverflowError):
        return tuple(ids)


def _content(fields: Mapping[str, Any]) -> Content:
    minibatch, payloads, size = (_number(fields, name) for name in ("minibatch", "payloads", "bytes"))
    digest, end = fields.get("content"), fields.get("end", False)
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("its field 'content' is no digest")
    if not isinstance(end, bool) or minibatch < 1:
        raise ValueError(f"it is of minibatch {minibatch}, which makes no sense")
    return Content(minibatch, payloads, size, digest, end)


def _perhaps(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _number(fields, name)


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"its field {name!r} is {str(value)[:40]}, which is no number from 0 to 2^53")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not value.isprintable():
        raise ValueError(f"its field {name!r} is no short text")
    return value
