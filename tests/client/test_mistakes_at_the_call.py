"""A call that can never succeed raises where it is made, though the device server has not run it yet."""

from __future__ import annotations

import re
from pathlib import Path

import proxied


def test_bad_numbers_and_shapes_raise_at_the_call_as_on_the_cpu_and_end_nothing(tmp_path: Path) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "mistakes_at_the_call.py"), folder=tmp_path)
    result = ended.result()
    assert result["cuda"] == result["cpu"]
    assert {kind for kind, _ in result["cuda"].values()} == {"RuntimeError", "NotImplementedError"}
    assert result["afterwards"] == {"sum": ["3.0"]}
    refused = "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision"
    assert result["transforms"].pop("what CUDA has, too") == ["", "nothing was raised"]
    assert {name: kind for name, (kind, _) in result["transforms"].items()} == dict.fromkeys(
        ("fft", "fft once more", "rfft of two dimensions", "irfft"), "RuntimeError"
    )
    assert all(text.startswith(refused) for _, text in result["transforms"].values()), result["transforms"]


UNKNOWN_TO_NCCL = ("int16", "uint16", "uint32", "uint64")
BITWISE = ("BAND", "BOR", "BXOR")


def refused_by_nccl(reduction: str, of_type: str) -> str:
    """How what PyTorch raises in front of NCCL begins; empty: nothing.  The cpu driver takes bits."""
    if of_type in UNKNOWN_TO_NCCL:
        return "TypeError: Input tensor data type is not supported for NCCL process group: "
    if reduction == "-":
        return ""
    if of_type.startswith("float8"):
        return "RuntimeError: Unsupported Float8 type for NCCL reduction"
    if of_type.startswith("complex"):
        return "" if reduction in ("SUM", "AVG") else "(ValueError|RuntimeError): .*complex tensors"
    if of_type == "bool" and reduction == "AVG":
        return "TypeError: Cannot use ReduceOp.AVG with boolean inputs"
    if reduction in BITWISE and "float" in of_type:
        return f"ValueError: Cannot use ReduceOp.{reduction} with NCCL"
    return ""


def test_what_nccl_does_not_take_raises_at_the_call_and_the_group_goes_on(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "mistakes_in_collectives.py"
    ended = proxied.run(proxied.ranks(2, script), folder=tmp_path, options=("--devices", "cpu:2"))
    result = ended.result()
    assert len(result["found"]) == 18 * (3 * 8 + 6)
    for what, came in result["found"].items():
        _, reduction, of_type = what.split()
        expected = refused_by_nccl(reduction, of_type) or "as expected"
        assert re.match(expected, came), (what, came, expected)
    assert result["afterwards"] == [2.0, 2.0, 2.0]
