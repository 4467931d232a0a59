"""Tensors of the CPU among those of the device: refused and accepted as by CUDA's kernels."""

from __future__ import annotations

from typing import Any

import proxied
import pytest

ITERATOR = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def _wrapper(argument: str, method: str, *, on: str = "cpu", others: str = "cuda:0") -> str:
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {on}, different from other "
        f"tensors on {others} (when checking argument in method wrapper_CUDA_{method})"
    )


def _convolution(of_input: str, other: str, of_other: str) -> str:
    return f"Input type ({of_input}) and {other} type ({of_other}) should be the same"


EXPECTED = {
    "add": ITERATOR,
    "add, the other way round": ITERATOR,
    "add_": ITERATOR,
    "add_ to the CPU's": ITERATOR,
    "add, out= on the CPU": ITERATOR,
    "add_ to a number": ITERATOR,
    "where": ITERATOR,
    "foreach": ITERATOR,
    "large": ITERATOR,
    "mm": _wrapper("mat2", "mm"),
    "mm, the other way round": _wrapper("mat2", "mm", on="cuda:0", others="cpu"),
    "addmm": _wrapper("mat1", "addmm"),
    "addmm, weight": _wrapper("mat2", "addmm"),
    "cat": _wrapper("tensors", "cat"),
    "index_select": _wrapper("index", "_index_select"),
    "gather": _wrapper("index", "gather"),
    "nll_loss": _wrapper("target", "nll_loss_forward"),
    "layer_norm": _wrapper("weight", "_native_layer_norm"),
    "sparse": "Expected all tensors to be on the same device",
    "convolution": _convolution("torch.cuda.FloatTensor", "weight", "torch.FloatTensor"),
    "convolution, bias": _convolution("torch.cuda.FloatTensor", "bias", "torch.FloatTensor"),
    "convolution, input": _convolution("torch.FloatTensor", "weight", "torch.cuda.FloatTensor"),
}
"""What PyTorch says with a GPU; of `sparse`, where each kernel has words of its own, how ours begins."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = proxied.WORKLOADS / "mixed_devices.py"
    ended = proxied.run(proxied.python(script), folder=tmp_path_factory.mktemp("mixed"))
    parsed: dict[str, Any] = ended.result()
    return parsed


@pytest.mark.parametrize("what", EXPECTED)
def test_a_cpu_tensor_among_cuda_tensors_raises_pytorchs_error_at_the_call(
    what: str, outcomes: dict[str, Any]
) -> None:
    for raised in outcomes["refused"][what]:
        assert raised[0] == "RuntimeError"
        assert raised[1].startswith(EXPECTED[what])


def test_too_many_indices_on_the_cpu_are_refused_with_the_way_out(outcomes: dict[str, Any]) -> None:
    for kind, text in outcomes["refused"]["large indices"]:
        assert kind == "NotImplementedError"
        assert "a CPU tensor of 8388608 bytes" in text
        assert "move it to the device first" in text


def test_numbers_and_what_cuda_takes_from_the_cpu_give_the_cpus_bits(outcomes: dict[str, Any]) -> None:
    for name, (native, first, second) in outcomes["accepted"].items():
        assert first == second == [line.replace("cpu", "cuda", 1) for line in native], name


def test_no_row_of_what_may_be_on_the_cpu_is_dead(outcomes: dict[str, Any]) -> None:
    assert outcomes["rows"]
    assert [row for row, uses in outcomes["rows"].items() if uses == 0] == []
