"""A training whose shapes never come back, with a dictionary that is full again and again."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import proxied
import pytest
from native_reference import native_reference
from running_proxyd import RunningProxyd

from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

pytestmark = pytest.mark.drawn(2)

DICTIONARY = 256 << 10
STEPS = 160
SMALL_DICTIONARY = f"""
import sys
from functools import partial
from understudy.recovery import proxyd
from understudy.recovery.config import proxyd_settings
proxyd_settings.Settings = partial(proxyd_settings.Settings, dictionary_bytes={DICTIONARY})
sys.exit(proxyd.main())
"""


class Watch(threading.Thread):
    """The most memory that any rank's dictionary ever had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.01):
            for file in SHARED_MEMORY.glob("understudy-*/*/rank-*/dictionary"):
                try:
                    self.most = max(self.most, 512 * file.stat().st_blocks)
                except FileNotFoundError:  # the session has just ended
                    continue

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.most


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Of a proxyd whose logs have small dictionaries."""
    program = (proxied.python("-c")[0], "-P", "-c", SMALL_DICTIONARY)
    proxyd = RunningProxyd(tmp_path / "proxyd.sock", 2, log=tmp_path / "proxyd.log", program=program)
    try:
        yield proxyd.socket
    finally:
        proxyd.stop()
        print((tmp_path / "proxyd.log").read_text())


def command(ranks: int, out: Path, *more: str) -> list[str]:
    script = proxied.WORKLOADS / "new_shapes.py"
    arguments = ("--steps", str(STEPS), "--out", str(out), *more)
    return proxied.ranks(ranks, script, *arguments) if ranks > 1 else proxied.python(script, *arguments)


def natively(ranks: int, folder: Path) -> list[str]:
    return command(ranks, folder / "out", "--device", "cpu")


@pytest.fixture(scope="module")
def native() -> dict[int, list[str]]:
    """By number of ranks, what each rank writes."""
    found = {}
    for ranks in (1, 2):
        out = native_reference(functools.partial(natively, ranks)) / "out"
        found[ranks] = [out.with_suffix(f".{rank}").read_text() for rank in range(ranks)]
        assert found[ranks][0].count("\n") > STEPS
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_outlives_its_dictionary_and_the_death_of_its_servers(
    ranks: int, socket: Path, native: dict[int, list[str]], tmp_path: Path
) -> None:
    """Kills strike when regions have been used for the second time and more, anywhere in a minibatch."""
    struck = [(80, 9), (120, 20), (150, 3)]
    drills = [
        f"kill-server rank={i % ranks} step={step} call={call}" for i, (step, call) in enumerate(struck)
    ]
    options = tuple(word for drill in drills for word in ("--drill", drill))
    watch = Watch()
    ended = proxied.run(
        command(ranks, tmp_path / "out"), folder=tmp_path, options=("--socket", str(socket), *options)
    )
    most = watch.stop()
    assert ended.status == 0, ended.output[-3000:]
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(ranks)] == native[ranks]
    recoveries: list[dict[str, Any]] = ended.report["recoveries"]
    assert [recovery["recovered"] for recovery in recoveries] == [True] * len(struck)
    assert ended.report["replies_different"] == 0
    marks = [json.loads(mark) for mark in re.findall("MARK ({.*?})", ended.output)]
    assert len(marks) == 8
    assert marks[-1]["dictionary_bytes"] > 3 * DICTIONARY, "the dictionary was too large for this test"
    assert 0 < most <= DICTIONARY
    # As many as the dictionary has room for, of those that still lie in it.
    assert max(mark["templates"] for mark in marks) < DICTIONARY // 128
