"""Who copies which piece of a snapshot, while buffers change and go: under ThreadSanitizer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compiled_programs import ROOT, THREAD_SANITIZER, compiled, need_thread_sanitizer

STRESS = "copy_stress.cpp"
CSRC = Path("proxy_server/csrc")
LIST = CSRC / "copy_list.cpp"
SOURCES = (str(LIST), str(CSRC / "copier.cpp"), "replay/csrc/log_map.cpp")


def stress(program: Path, snapshots: int, seed: int) -> subprocess.CompletedProcess[str]:
    words = [str(program), str(snapshots), str(seed)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=230)
    print(found.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sanitized")
    need_thread_sanitizer(made)
    return made


@pytest.mark.parametrize("snapshots", [3000, pytest.param(15_000, marks=pytest.mark.long)])
def test_buffers_that_change_while_they_are_copied_do_not_race(
    folder: Path, seed: int, snapshots: int
) -> None:
    program = compiled(folder / "stress", STRESS, *THREAD_SANITIZER, more=SOURCES)
    found = stress(program, snapshots, seed)
    assert found.returncode == 0 and "WARNING" not in found.stderr, found.stdout + found.stderr[:4000]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("piece < first_[row + 1]; piece++) wait_for(piece);", "false;) wait_for(piece);"),
        ("!piece.state.compare_exchange_strong(state, kCopying, std::memory_order_acquire)",
         "piece.state.load() != state"),
    ],
)  # fmt: skip
def test_the_same_stress_finds_what_is_done_wrong(
    folder: Path, tmp_path: Path, seed: int, right: str, wrong: str
) -> None:
    text = (ROOT / LIST).read_text()
    assert text.count(right) == 1
    (tmp_path / CSRC).mkdir(parents=True)
    (tmp_path / LIST).write_text(text.replace(right, wrong))
    program = compiled(tmp_path / "stress", STRESS, *THREAD_SANITIZER, first=tmp_path, more=SOURCES)
    found = stress(program, 3000, seed)
    assert found.returncode != 0 or "data race" in found.stderr
