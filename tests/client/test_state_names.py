"""What the worker says of its models and optimizers is what their state_dict() says."""

from __future__ import annotations

from pathlib import Path

import proxied
import pytest

from understudy.recovery.snapshots.writing.description import (
    Omitted,
    TensorPlace,
    Undescribed,
    read_description,
)


@pytest.mark.drawn(2)
def test_models_and_optimizers_of_many_kinds_are_described_as_by_their_state_dict(tmp_path: Path) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "described.py"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert "described" in ended.output


@pytest.mark.drawn(2)
def test_modules_made_later_are_described_without_looking_at_every_object_again(tmp_path: Path) -> None:
    ended = proxied.run(proxied.python(proxied.WORKLOADS / "described_later.py"), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert "described" in ended.output


def test_a_description_that_makes_no_sense_is_refused_in_one_sentence() -> None:
    tensor = '{"dtype": "float32", "size": [2], "stride": [1], "handle": 3, "offset": 0}'

    def module(tensor: str) -> bytes:
        return f'{{"modules": [{{"class": "A", "state": {{"w": {tensor}}}}}], "optimizers": []}}'.encode()

    assert read_description(module(tensor))
    optimizer = b'{"class": "A", "groups": [], "state": {"x": {}}, "parameters": []}'
    bad = [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"modules": 3, "optimizers": []}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"modules": [], "optimizers": [' + optimizer + b"]}",
        module('{"dtype": "float32"}'),
        module(tensor.replace("[2]", "[-2]")),
        module(tensor.replace("[1]", "[1, 1]")),
        module(tensor.replace("0}", "-8}")),
        module(tensor.replace('"handle": 3', '"handle": "x"')),
        module(tensor.replace('"handle": 3', '"content": "*"')),
    ]
    for content in bad:
        with pytest.raises(Undescribed):
            read_description(content)


def test_what_is_omitted_and_what_is_a_tuple_stay_so() -> None:
    content = b"""{
        "modules": [{"class": "A", "state": {
            "w": {"omitted": "a DTensor"},
            "b": {"dtype": "int64", "size": [], "stride": [], "content": "AQAAAAAAAAA="}
        }}],
        "optimizers": [{
            "class": "B",
            "groups": [{"options": {"betas": {"tuple": [0.9, NaN]}, "list": [1]}, "params": [0]}],
            "state": {}, "parameters": [null]
        }]
    }"""
    described = read_description(content)
    assert described.modules[0].state["w"] == Omitted("a DTensor")
    assert described.modules[0].state["b"] == TensorPlace("int64", (), (), 0, 0, b"\1" + bytes(7))
    options = described.optimizers[0].groups[0].options
    assert isinstance(options["betas"], tuple) and options["list"] == [1]
