"""Which checkpoints count: those that are whole, and nothing in them is executed (paper 002 §4.3-4.6)."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed_training import Training, saved

from understudy.data import CheckpointError
from understudy.data.checkpoint_files import Place, places, pointed_at


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def writing(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def nest_deeply(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def with_huge_number(path: Path) -> None:
    path.write_bytes(b'{"sequence": ' + b"9" * 5000 + b"}")


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("rank-00000.pt", cut_in_half, "bytes instead of"),
    ("rank-00000.pt", flip_a_bit, "its digest is not the one"),
    ("rank-00000.pt", Path.unlink, "cannot be read"),
    ("rank-00000.json", cut_in_half, "is damaged"),
    ("rank-00000.json", Path.unlink, "was not finished"),
    ("rank-00000.json", nest_deeply, "nested too deeply"),
    ("rank-00000.json", with_huge_number, "is damaged"),
    ("rank-00000.json", writing("[]"), "no JSON object"),
    ("rank-00000.json", writing("{}"), "its field 'sequence' is None"),
]


@pytest.mark.parametrize(("file", "damage", "sentence"), DAMAGE)
def test_of_a_damaged_newest_checkpoint_the_one_before_it_is_taken_with_a_warning(
    folder: Path, file: str, damage: Callable[[Path], None], sentence: str
) -> None:
    saved(folder)
    damage(folder / "000003-step-3" / file)

    with (
        Training().pack(folder) as pack,
        pytest.warns(UserWarning, match=f"000003-step-3 is passed over.*{sentence}"),
    ):
        start = pack.load()

    assert start is not None
    assert start.step == 2


def test_a_record_of_another_checkpoint_does_not_make_one_whole(folder: Path) -> None:
    saved(folder)
    for name in ("rank-00000.pt", "rank-00000.json"):
        (folder / "000002-step-2" / name).replace(folder / "000003-step-3" / name)

    with (
        Training().pack(folder) as pack,
        pytest.warns(UserWarning, match="is that of another checkpoint: number 2"),
    ):
        start = pack.load()

    assert start is not None
    assert start.step == 1


def test_where_none_is_whole_the_run_does_not_begin_anew_unnoticed(folder: Path) -> None:
    saved(folder, steps=2)
    for place in places(folder):
        flip_a_bit(folder / place.name / "rank-00000.pt")

    with Training().pack(folder) as pack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=r"None of the 2 checkpoints in .* is whole"):
            pack.load()


@pytest.mark.parametrize("damage", [Path.unlink, cut_in_half, nest_deeply, writing("{}")])
def test_without_its_pointer_the_newest_whole_checkpoint_is_taken_with_a_warning(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    saved(folder)
    damage(folder / "latest.json")

    with Training().pack(folder) as pack, pytest.warns(UserWarning, match=r"latest\.json.*is taken"):
        start = pack.load()

    assert start is not None
    assert start.step == 3


def test_what_the_pointer_does_not_name_yet_does_not_count(folder: Path) -> None:
    saved(folder)
    (folder / "latest.json").write_text('{"folder": "000002-step-2"}')

    with Training().pack(folder) as pack:
        start = pack.load()
        pack.save(3)

    assert start is not None
    assert start.step == 2
    assert pointed_at(folder) == Place(4, 3), "its number is not given twice"


class Malicious:
    """Executes what it says as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_payload_that_would_execute_something_is_not_executed_even_if_its_digest_is_right(
    folder: Path,
) -> None:
    saved(folder)
    import hashlib

    data = pickle.dumps(Malicious(folder / "executed"))
    place = folder / "000003-step-3"
    (place / "rank-00000.pt").write_bytes(data)
    record = json.loads((place / "rank-00000.json").read_text())
    record |= {"size": len(data), "digest": hashlib.blake2b(data, digest_size=32).hexdigest()}
    (place / "rank-00000.json").write_text(json.dumps(record))

    with Training().pack(folder) as pack, pytest.warns(UserWarning, match="passed over"):
        start = pack.load()

    assert start is not None
    assert start.step == 2
    assert not (folder / "executed").exists()
