"""What fuzzing found stays mended: the corpora of fuzz/, and mutations of them, without a fuzzer.

`make fuzz` looks for more (fuzz/README.md).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import fuzz_targets
import make_seeds
import pytest
from compiled_programs import program

MUTATIONS, SEED = 5000, 1


@pytest.mark.parametrize("target", sorted(fuzz_targets.TARGETS))
def test_nothing_in_a_corpus_or_near_it_harms_a_reader(target: str) -> None:
    command = [
        str(program(f"fuzz_{target}")),
        "--mutations",
        str(MUTATIONS),
        "--seed",
        str(SEED),
        str(fuzz_targets.corpus(target)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    assert f"{MUTATIONS} mutations of seed {SEED}: nothing found" in done.stdout


@pytest.mark.parametrize("target", sorted(fuzz_targets.TARGETS))
def test_a_corpus_holds_the_inputs_that_are_made_by_hand(target: str) -> None:
    made = {"record_reader": make_seeds.records, "manifest": make_seeds.manifests}[target]()
    kept = {file.name: file.read_bytes() for file in fuzz_targets.corpus(target).iterdir()}
    assert {f"seed-{name}": content for name, content in made.items()}.items() <= kept.items()


def test_a_fault_in_a_target_is_reported_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"\xab\xcd")
    command = [str(program("fuzz_faulty")), str(tmp_path / "input")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr and "2 bytes:\nabcd" in done.stderr
