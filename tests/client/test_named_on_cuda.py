"""Kernels and reductions that scripts ask for by the names that CUDA and NCCL have for them."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest

pytestmark = pytest.mark.drawn(2)


def test_attentions_kernels_and_premultiplied_sums_can_be_asked_for_by_name(tmp_path: Path) -> None:
    ended = proxied.run(proxied.ranks(2, proxied.WORKLOADS / "named_on_cuda.py"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert ended.output.count("right") == 2


@pytest.mark.cold
def test_attention_over_packed_sequences_and_with_a_bias_is_the_cpus_with_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that it gives as numbers are asked for once for each shape."""
    monkeypatch.setenv("UNDERSTUDY_STATISTICS", "1")
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "packed_attention.py"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert "right" in ended.output
