"""Whoever reads JSON of another process refuses what it does not know by its own error, and no other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.hostile_json import read_plain
from understudy.recovery.history.recorder import parse as parse_history
from understudy.recovery.membership.records import BadRecord
from understudy.recovery.membership.records import read as read_record
from understudy.recovery.migration.process.images import MANIFEST, Damaged, verify
from understudy.recovery.snapshots.log import log_messages
from understudy.recovery.snapshots.log.stored_log import About, BadLog, Frame, Kind, read_about
from understudy.recovery.snapshots.remote import mirror_messages
from understudy.recovery.snapshots.remote.mirror_manifest import (
    Extent,
    MirroredPart,
    MirroredSet,
    decode_manifest,
    encode_manifest,
)
from understudy.recovery.snapshots.remote.second_tier import SetName
from understudy.recovery.snapshots.writing import request
from understudy.recovery.snapshots.writing.description import Undescribed, read_description

OF = SetName("job", "r-1-2-3", 7)
PARTS = (MirroredPart(0, "rank-0-00000000000000aa.part", 10, (Extent(1, 2, 4, 0), Extent(1, 3, 4, 4)), (5,)),)
MIRRORED = MirroredSet(OF, 10, 1_800_000_000, 16 << 20, PARTS)
DESCRIBED = {
    "modules": [{"class": "Linear", "state": {"weight": {
        "dtype": "float32", "size": [2, 2], "stride": [2, 1], "handle": 3, "offset": 0,
        "shard": {"of": [4, 2], "at": [2, 0], "ranks": [0, 1]},
    }}}],
    "optimizers": [{"class": "Adam",
                    "groups": [{"options": {"betas": {"tuple": [0.9, 0.99]}}, "params": [0]}],
                    "state": {"0": {"step": {"omitted": "why"}}}, "parameters": [[0, "weight"], None]}],
    "schedulers": [{"class": "StepLR",
                    "state": {"last": {"dict": [[1, 2]]}, "of": {"counter": [["a", 1]]}}}],
    "data": [{"loader": 0, "class": "DataLoader", "iterations": 1, "batches": 2, "batch_size": None,
              "may_read_ahead": False, "sampler": {"epoch": 1}}],
}  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    1 << 63,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "é\0",
    [],
    {},
    [[]],
    {"a": {}},
    "9" * 5000,
)
DEEP = (b"[" * 100_000, b'{"a":' * 100_000, b'{"persist":' + b"[" * 100_000)
Reader = Callable[[bytes], object]


def read_image_folder(folder: Path) -> Reader:
    def read(content: bytes) -> None:
        (folder / MANIFEST).write_bytes(content)
        verify(folder)

    return read


def read_history(content: bytes) -> None:
    """A line that makes no sense is passed over there."""
    if parse_history(content) is None:
        raise ValueError


def readers(folder: Path) -> dict[str, tuple[Reader, type[Exception], bytes]]:
    """How each is called, what it may raise, and what it takes."""
    written = request.Written(3, "run", 1, 10, 1 << 40, 0.5, "a sentence")
    follow = log_messages.Follow("cpu", (log_messages.Rank(0, "/a", 1),))
    about = About("job", "run", 0, 1, "cpu", 1, 4096, 1 << 20).encode()
    asked = request.Persist(3, "r", 2, {1: "/a"}, (1, 2)).encode()
    target = mirror_messages.Target("s3://a", 2, 3).encode()
    uploaded = mirror_messages.Copied(1, 2, 3, 0.5).encode()
    return {
        "plain": (read_plain, ValueError, b'{"a": [1]}'),
        "request": (request.decode_request, ValueError, asked),
        "answer": (request.decode_answer, ValueError, written.encode()),
        "log": (log_messages.decode, ValueError, follow.encode()),
        "target": (mirror_messages.decode_target, ValueError, target),
        "uploaded": (mirror_messages.decode_answer, ValueError, uploaded),
        "manifest": (lambda content: decode_manifest(content, OF), ValueError, encode_manifest(MIRRORED)),
        "about": (lambda content: read_about(Frame(Kind.ABOUT, 0, content, 0)), BadLog, about),
        "described": (read_description, Undescribed, json.dumps(DESCRIBED).encode()),
        "history": (read_history, ValueError, b'{"at_ms": 5, "kind": "start", "job": "j", "rank": 1}'),
        "record": (lambda content: read_record(content, pb.HostRecord), BadRecord, b'{"version": 1}'),
        "images": (read_image_folder(folder), Damaged, b'{"images": {"core-1.img": [3, "00"]}}'),
    }


def spoilt(chance: random.Random, whole: Any) -> Any:
    """The same document with another value somewhere, or without one, or with one more."""
    if isinstance(whole, dict) and whole and chance.random() < 0.9:
        key = chance.choice(sorted(whole))
        done = dict(whole)
        match chance.randrange(6):
            case 0:
                del done[key]
            case 1:
                done[chance.choice(["more", "-1", ""])] = chance.choice(HOSTILE)
            case _:
                done[key] = spoilt(chance, whole[key])
        return done
    if isinstance(whole, list) and whole and chance.random() < 0.9:
        place = chance.randrange(len(whole))
        return [spoilt(chance, one) if number == place else one for number, one in enumerate(whole)]
    return chance.choice(HOSTILE)


@pytest.mark.parametrize("name", sorted(readers(Path())))
def test_what_is_no_such_document_is_refused_by_the_readers_own_error(
    name: str, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    reader, refuses, good = readers(tmp_path)[name]
    if name != "images":  # its file is not there
        reader(good)
    whole = json.loads(good)
    documents = [json.dumps(spoilt(chance, whole)).encode() for _ in range(400)]
    documents += [good[: chance.randrange(len(good))] for _ in range(20)]
    documents += [bytes(chance.randbytes(40)), b"\xff" * 9, b"", *DEEP]
    refused = 0
    for document in documents:
        try:
            reader(document)
        except refuses:
            refused += 1
    print(f"refused {refused} of {len(documents)}")
    assert refused > 3, "it takes whatever it is given"


def test_a_manifest_that_was_read_is_the_one_that_was_written() -> None:
    assert decode_manifest(encode_manifest(MIRRORED), OF) == MIRRORED
    with pytest.raises(ValueError, match="of another set"):
        decode_manifest(encode_manifest(MIRRORED), SetName("job", "r-1-2-3", 8))
