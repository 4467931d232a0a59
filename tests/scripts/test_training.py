"""Unmodified scripts under the proxy: the same losses as natively, bit for bit."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest
from native_reference import native_losses, native_reference
from training_run import Training

SMALL = ["--layers", "2", "--width", "48", "--batch-size", "4", "--block-size", "32"]
EXAMPLES = {
    "char_gpt": lambda ranks, steps, dropout: Training(
        "char_gpt.py", ranks, steps, [*SMALL, "--dropout", str(dropout)]
    ),
    "digits_convnet": lambda ranks, steps, dropout: Training(
        "digits_convnet.py", ranks, steps, ["--dropout", str(dropout)]
    ),
}


@pytest.mark.parametrize(
    ("example", "ranks"),
    [
        ("char_gpt", 2),
        ("digits_convnet", 1),
        pytest.param("char_gpt", 1, marks=pytest.mark.long),
        pytest.param("digits_convnet", 2, marks=pytest.mark.long),
    ],
)
def test_losses_under_the_proxy_equal_native_ones_bit_for_bit(
    example: str, ranks: int, tmp_path: Path
) -> None:
    training = EXAMPLES[example](ranks, 12, 0.0)
    under_proxy = training.run(tmp_path / "proxied", proxied=True)
    assert under_proxy.losses == native_losses(training)
    assert under_proxy.report["steps"] == 12
    assert under_proxy.report["recoveries"] == []


@pytest.mark.drawn(4)
@pytest.mark.cold
def test_every_collective_gives_the_bytes_that_gloo_gives_natively_also_when_servers_die(
    tmp_path: Path,
) -> None:
    """Each step calls all of them; the first two and the last three are not disturbed."""
    command = proxied.torchrun(2, proxied.WORKLOADS / "collectives.py", "--steps", "20", "--out")
    native = native_reference(lambda folder: [*command, str(folder / "native.x"), "--device", "cpu"])
    drills = [f"kill-server rank={i % 2} step={3 + 2 * i} call={5 + 9 * i}" for i in range(8)]
    options = tuple(word for drill in drills for word in ("--drill", drill))
    ended = proxied.run([*command, str(tmp_path / "proxied.x")], folder=tmp_path, options=options)
    assert ended.status == 0, ended.output[-3000:]
    assert len(ended.report["recoveries"]) == len(drills)
    for rank in range(2):
        assert (tmp_path / f"proxied.{rank}").read_bytes() == (native / f"native.{rank}").read_bytes()
