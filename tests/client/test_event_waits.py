"""A script that waits for an event waits for what is in front of it, and for nothing behind it."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest
import simulated_device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.long)])
def test_a_wait_for_an_event_ends_amid_the_work_behind_it_also_when_the_server_dies(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cuda` is a simulated device, and long as it is not yet steady: on a machine that is busy with much
    else the device may be through with all when the script goes on."""
    if device == "cuda":
        simulated_device.put_in_place(monkeypatch)
    script = proxied.python(proxied.WORKLOADS / "event_waits.py")
    told = []
    for drills in ((), ("--drill", "kill-server rank=0 step=1 call=25")):
        done = proxied.run(script, folder=folder, options=("--devices", f"{device}:1", *drills))
        assert done.status == 0, done.output[-3000:]
        told += [line for line in done.output.splitlines() if line.startswith("right ")]
        assert [one["recovered"] for one in done.report["recoveries"]] == [True] * bool(drills)
    assert len(told) == 2 and told[0] == told[1]
