"""Digests of payloads: XXH3-64, and BLAKE2b as older versions and checkouts write it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jit_shards import chosen, complete, folders, hidden, taken
from places import MODULES

from understudy.jit import digest
from understudy.jit.reading import sealed, unsealed

# By the package `xxhash`, of so many bytes of "understudy", repeated.
KNOWN = [
    (0, "2d06800538d394c2"), (1, "0de0f3cef1e76922"), (3, "d675e4d2a6dcbd1c"), (16, "3d8352128740a2ed"),
    (17, "191c68f9a88df3da"), (128, "5e223896c9bf902e"), (129, "97f7f8e3213a24a3"), (240, "b73c0bdd2a5f3833"),
    (241, "90ff571e9c48686f"), (1024, "24986d63f9e6da71"), (2**20 - 1, "4d8e71714120c3c8"),
    (2**20, "eaa0d74192afb865"), (2**20 + 1, "6344adb358cf6766"), (3 * 2**20 + 17, "66176492c04e57ca"),
]  # fmt: skip
CHECKOUT = "import sys; sys.modules['understudy.jit._digest'] = None\n"


def elsewhere(script: str, *arguments: Path) -> str:
    """What a process of its own prints, which finds the modules of the tests."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(MODULES)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("size", "expected"), KNOWN)
def test_the_digest_of_a_file_is_xxh3(tmp_path: Path, size: int, expected: str) -> None:
    path = tmp_path / "file"
    path.write_bytes((b"understudy" * (size // 10 + 1))[:size])
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)  # wherever it was read to
        assert digest.of_file(file.fileno()) == digest.FileDigest(size, expected, "xxh3-64")


def test_a_file_that_cannot_be_read_raises(tmp_path: Path) -> None:
    number = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            digest.of_file(number)
    finally:
        os.close(number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        digest.of_file(number)


def test_a_checkout_writes_what_an_installed_version_verifies(tmp_path: Path) -> None:
    elsewhere(
        CHECKOUT
        + "from pathlib import Path\nfrom jit_shards import complete\ncomplete(Path(sys.argv[1]), 3)",
        tmp_path,
    )
    assert unsealed((folders(tmp_path)[0] / "metadata.json").read_bytes())["algorithm"] == "blake2b-64"
    assert taken(tmp_path) == (3, "s0 of 3")

    payload = folders(tmp_path)[0] / "payload"
    payload.write_text("s0 of 4")
    assert taken(tmp_path) is None


def test_a_checkout_does_not_begin_anew_where_it_cannot_verify_what_is_there(tmp_path: Path) -> None:
    complete(tmp_path, 3)
    said = elsewhere(
        CHECKOUT + "from pathlib import Path\nfrom jit_shards import identity\n"
        "from understudy.jit.storage import ShardDirectory\n"
        "from understudy.jit.identity import JitError\n"
        "place = ShardDirectory(Path(sys.argv[1]), identity(attempt='next'))\n"
        "try: print('taken', place.choose())\n"
        "except JitError as error: print(error)",
        tmp_path,
    )
    assert said.startswith("Checkpoints here have xxh3-64 digests, which only an installed version computes")
    assert hidden(tmp_path) == [] and taken(tmp_path) == (3, "s0 of 3")


def test_a_digest_is_held_against_the_algorithm_that_its_metadata_names(tmp_path: Path) -> None:
    complete(tmp_path, 3)
    path = folders(tmp_path)[0] / "metadata.json"
    fields = unsealed(path.read_bytes())
    assert fields["algorithm"] == "xxh3-64"
    path.write_bytes(sealed({**fields, "algorithm": "blake2b-64"}))
    assert chosen(tmp_path) is None
