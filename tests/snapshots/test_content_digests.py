"""Digests of buffers' contents: what they are, and that a GPU's code makes the same."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from compiled_programs import ROOT, program

from understudy.replay import content_digest, digest

WHOLE, PIECE = 256, 4096
CODE = ROOT / "proxy_server" / "csrc" / "gpu" / "piece_digests.cu"


@pytest.mark.parametrize("size", [0, 1, 240, WHOLE])
def test_a_short_content_has_the_digest_of_its_bytes(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert content_digest(content) == digest(content)


@pytest.mark.parametrize(
    "size", [WHOLE + 1, PIECE, PIECE + 1, 2 * PIECE, 63 * PIECE + 5, 64 * PIECE, 65 * PIECE, 300 * PIECE - 1]
)
def test_more_has_that_of_the_digests_of_its_pieces_and_its_length(size: int) -> None:
    content = random.Random(size).randbytes(size)
    pieces = [content[at : at + PIECE].ljust(PIECE, b"\0") for at in range(0, size, PIECE)]
    leaves = b"".join(struct.pack("<Q", digest(piece)) for piece in pieces)
    assert content_digest(content) == digest(leaves + struct.pack("<Q", size))
    assert content_digest(content + b"\0") != content_digest(content)


def test_what_a_gpus_threads_make_of_a_piece_is_its_xxh3(seed: int) -> None:
    words = [str(program("piece_digest")), "16384", str(seed)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, "16384 pieces, 0 differ from xxhash\n")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_a_gpus_code_is_compiled_without_a_spill(architecture: str, tmp_path: Path) -> None:
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("CUDA's headers and runtime are not here: there is no nvcc")
    words = [nvcc, "-std=c++20", f"-arch={architecture}", "-cubin", "-Xptxas", "-v", f"-I{ROOT}",
             "-o", str(tmp_path / "code"), str(CODE)]  # fmt: skip
    found = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    spilled = re.findall(r"(\d+) bytes spill", found.stderr)
    assert spilled and set(spilled) == {"0"}
