"""A call that can never succeed raises where it is made, though the device server has not run it yet."""

from __future__ import annotations

import json
from pathlib import Path

import proxied


def test_bad_numbers_and_shapes_raise_at_the_call_as_on_the_cpu_and_end_nothing(tmp_path: Path) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "mistakes_at_the_call.py"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    result = json.loads(ended.output.split("RESULT ", 1)[1].splitlines()[0])
    assert result["cuda"] == result["cpu"]
    assert {kind for kind, _ in result["cuda"].values()} == {"RuntimeError", "NotImplementedError"}
    assert result["afterwards"] == {"sum": ["3.0"]}
