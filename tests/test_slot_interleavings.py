"""Who may write which slot, in every order of atomic steps; and the whole store under ThreadSanitizer.

`workloads/slot_model.cpp` runs the real SlotTable and IndexRing on atomics that give the turn back.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from compiled_programs import ROOT, THREAD_SANITIZER, compiled, need_thread_sanitizer

CSRC = Path("recovery/persistence/csrc")
SHORT = ["ring-1-2", "ring-2-2", "alone-2-2", "alone-3-2", "alone-2-2-failing", "alone-3-2-failing"]
SHORT += ["agreed-3-2", "agreed-3-2-failing", "ring-2-3"]
LONG = ["ring-3-3", "alone-2-3", "alone-3-3", "agreed-4-3"]

TAKE = "if (!head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;"


def run_model(program: Path, *scenarios: str) -> list[str]:
    lines = []
    for scenario in scenarios:
        found = subprocess.run([program, scenario], capture_output=True, text=True, timeout=230)
        lines += found.stdout.splitlines()
        assert len(lines) > 0, f"there is no scenario {scenario}: {found.stderr}"
    print("\n".join(lines))
    return lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("model") / "model", "slot_model.cpp", "-O2")


def test_no_order_of_steps_loses_a_slot_or_hands_out_one_that_is_needed(model: Path) -> None:
    lines = run_model(model, *SHORT)
    assert len(lines) == len(SHORT)
    assert not [line for line in lines if "VIOLATION" in line]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_order_of_steps_of_three_snapshots_loses_a_slot_or_hands_out_one_that_is_needed(
    model: Path,
) -> None:
    lines = run_model(model, *LONG)
    assert len(lines) == len(LONG)
    assert not [line for line in lines if "VIOLATION" in line]


@pytest.mark.parametrize(
    ("header", "right", "wrong", "scenario", "violation"),
    [
        ("slot_table.h", "doubtful_.push_back(slot);", "give_back(slot);", "alone-2-2-failing", "not whole"),
        ("slot_table.h", "free_.push(slot);\n    freed_.raise();", "free_.push(slot);", "alone-2-2", "waits"),
        ("slot_table.h", "freed_.raise();  // it stays", ";  // it stays", "alone-2-2-failing", "waits"),
        ("commit_rule.h", "snapshot.sequence > now.latest_sequence", "true", "agreed-3-2", "goes back"),
        (
            "slot_table.h",
            "write(std::as_const(change.next));\n    } catch",
            "} catch",
            "alone-2-2",
            "is durable",
        ),
        ("commit_rule.h", "slot == next.latest_slot", "false", "alone-2-2", "latest is nowhere"),
        (
            "index_ring.h",
            TAKE,
            "head_.store(at + 1, std::memory_order_relaxed);",
            "ring-2-2",
            "more numbers came back",
        ),
    ],
)
def test_the_same_orders_find_what_is_done_wrong(
    tmp_path: Path, header: str, right: str, wrong: str, scenario: str, violation: str
) -> None:
    changed = tmp_path / CSRC
    shutil.copytree(ROOT / CSRC, changed)
    text = (changed / header).read_text()
    assert right in text
    (changed / header).write_text(text.replace(right, wrong))
    program = compiled(tmp_path / "model", "slot_model.cpp", "-O1", first=tmp_path)
    [line] = run_model(program, scenario)
    assert "VIOLATION" in line and violation in line


# ---------------------------------------------------------------- ThreadSanitizer
STORE = ("store_format.cpp", "superblocks.cpp", "snapshot_reader.cpp", "pipeline.cpp", "store.cpp")
SOURCES = tuple(str(CSRC / name) for name in (*STORE, "recorded_disk.cpp"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stress program, where the compiler's ThreadSanitizer works."""
    folder = tmp_path_factory.mktemp("sanitized")
    need_thread_sanitizer(folder)
    return compiled(folder / "stress", "store_stress.cpp", *THREAD_SANITIZER, more=SOURCES)


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.long)])
def test_threads_that_use_a_store_all_at_once_do_not_race(sanitized: Path, seed: int, seconds: int) -> None:
    found = subprocess.run([sanitized, str(seconds), str(seed)], capture_output=True, text=True, timeout=230)
    print(found.stdout)
    assert found.returncode == 0 and "WARNING" not in found.stderr, found.stderr[:4000]
