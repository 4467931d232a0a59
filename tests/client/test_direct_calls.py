"""Operators that are called by their own signature."""

from __future__ import annotations

from pathlib import Path

import proxied


def test_every_row_of_the_typed_kernels_is_in_use_and_finds_its_template_again(tmp_path: Path) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "direct_calls.py"), folder=tmp_path)
    result = ended.result()
    assert len(result["rows"]) > 90
    assert [name for name, in_use in result["rows"] if not in_use] == []
    assert result["unstable"] == []
