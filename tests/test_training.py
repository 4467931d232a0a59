"""Unmodified scripts under the proxy: the same losses as natively, bit for bit."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest
from training_run import Training, execute_natively

SMALL = ["--layers", "2", "--width", "48", "--batch-size", "4", "--block-size", "32"]
EXAMPLES = {
    "char_gpt": lambda ranks, steps, dropout: Training(
        "char_gpt.py", ranks, steps, [*SMALL, "--dropout", str(dropout)]
    ),
    "digits_convnet": lambda ranks, steps, dropout: Training(
        "digits_convnet.py", ranks, steps, ["--dropout", str(dropout)]
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES)
def test_losses_under_the_proxy_equal_native_ones_bit_for_bit(
    example: str, ranks: int, tmp_path: Path
) -> None:
    training = EXAMPLES[example](ranks, 12, 0.0)
    native = training.run(tmp_path / "native", proxied=False)
    under_proxy = training.run(tmp_path / "proxied", proxied=True)
    assert under_proxy.losses == native.losses
    assert under_proxy.report["steps"] == 12
    assert under_proxy.report["recoveries"] == []


def test_every_collective_gives_the_bytes_that_gloo_gives_natively(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "collectives.py"
    native = proxied.torchrun(
        2, script, "--device", "cpu", "--out", str(tmp_path / "native.x"), "--steps", "2"
    )
    execute_natively(native, 120)
    ended = proxied.run(
        proxied.torchrun(2, script, "--out", str(tmp_path / "proxied.x"), "--steps", "2"), folder=tmp_path
    )
    assert ended.status == 0, ended.output[-3000:]
    for rank in range(2):
        assert (tmp_path / f"proxied.{rank}").read_bytes() == (tmp_path / f"native.{rank}").read_bytes()
