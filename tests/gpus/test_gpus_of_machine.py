"""How many GPUs `proxyrun` believes are there to be chosen, before anybody has asked a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.recovery.machine.gpus import gpus_of_machine


@pytest.mark.parametrize(
    ("given", "count"),
    [(None, 3), ("0,1", 2), ("GPU-5ebe9fae", 1), ("", 0), ("-1", 0), ("0,1,2,3,4", 3), (" 1 , ", 1)],
)
def test_a_job_that_was_given_some_gpus_of_its_host_has_no_others(
    given: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0000:1b:00.0", "0000:2c:00.0", "0000:9d:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus_of_machine(tmp_path) == count


def test_without_a_driver_there_is_none(tmp_path: Path) -> None:
    assert gpus_of_machine(tmp_path / "absent") == 0
