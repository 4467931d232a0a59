"""Digests of contents that come in pieces, as those of a GPU do: the same as of the whole."""

from __future__ import annotations

import subprocess
from operator import attrgetter

import pytest
from compiled_programs import program
from mistakes import Mistake, mistakes_of

PIECES = "digest_pieces"


def digest_pieces(name: str, contents: int, seed: int) -> subprocess.CompletedProcess[str]:
    words = [str(program(name)), str(contents), str(seed)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    print(found.stdout)
    return found


def test_a_digest_does_not_depend_on_the_pieces_in_which_its_content_comes(seed: int) -> None:
    found = digest_pieces(PIECES, 300, seed)
    assert found.returncode == 0 and ", 0 wrong" in found.stdout, found.stdout + found.stderr[:4000]


@pytest.mark.parametrize("mistake", mistakes_of(PIECES), ids=attrgetter("name"))
def test_a_digest_that_loses_something_of_a_piece_is_found_out(mistake: Mistake, seed: int) -> None:
    found = digest_pieces(mistake.built, 10, seed)
    assert found.returncode == 1 and "another digest than the whole" in found.stdout, found.stderr[:4000]
