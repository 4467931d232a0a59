"""What the client computes itself instead of PyTorch is what PyTorch computes on a CPU, bit for bit."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("family", "at_least"), [("attention", 1200), ("recurrent", 1600), ("loss and dropout", 1000)]
)
def test_values_gradients_and_errors_of_every_composite_are_those_of_the_cpu(
    family: str, at_least: int, tmp_path: Path
) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "composites.py", family), folder=tmp_path)
    result = ended.result()
    assert result["differ"] == []
    assert result["cases"] >= at_least
    assert result["raised"] < result["cases"] / 4
