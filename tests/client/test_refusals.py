"""What a virtual device cannot do says so: what, why, and what to use instead."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import proxied
import pytest
from proxied import WORKLOADS, python

from understudy.proxy_client.refusals import REFUSALS, Kind, Refusal, Where

BY_NAME = (Where.TORCH_C, Where.STORAGE, Where.EVENT, Where.CUDA)
CONDITIONAL = (Kind.OF_SEVERAL_DEVICES, Kind.WARNING)


def result_of(script: str, folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    ended = proxied.run(python(WORKLOADS / script, *arguments), folder=folder, options=options)
    found: dict[str, Any] = ended.result()
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names: dict[str, list[str]] = {where.value: [] for where in BY_NAME}
    for row in REFUSALS:
        if row.where in BY_NAME and row.kind not in CONDITIONAL:
            names[row.where.value] += row.names
    return result_of(
        "refused.py", tmp_path_factory.mktemp("refused"), json.dumps(names), options=("--devices", "cpu:2")
    )


def assert_refused(outcome: list[Any], row: Refusal) -> None:
    kinds, message = outcome
    assert message == row.sentence
    assert (UserWarning if row.kind is Kind.WARNING else row.error).__name__ in kinds


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.what)
def test_every_row_is_reached_by_a_script_and_raises_its_own_sentence(
    row: Refusal, refused: dict[str, Any]
) -> None:
    outcomes = [refused[request] for request in refused if row.what.startswith(request.partition(", ")[0])]
    assert outcomes, f"no request of workloads/refused.py is about {row.what}"
    assert any(message == row.sentence for _, message in outcomes), outcomes
    for name in row.names if row.where in BY_NAME and row.kind not in CONDITIONAL else ():
        assert_refused(refused[f"{row.where.value}.{name}"], row)


def test_every_request_meets_a_row(refused: dict[str, Any]) -> None:
    sentences = {row.sentence: row for row in REFUSALS}
    for request, outcome in refused.items():
        assert outcome[1] in sentences, (request, outcome)
        assert_refused(outcome, sentences[outcome[1]])


def test_rows_say_what_why_and_what_to_use_instead() -> None:
    assert len({row.sentence for row in REFUSALS}) == len(REFUSALS)
    for row in REFUSALS:
        assert row.what and row.why and row.instead and row.names, row


# ------------------------------------------------------------------ raw pointers
@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result_of("followed_pointers.py", tmp_path_factory.mktemp("followed"))


SENTENCE = "understudy: raw device pointer used by host code"
INSTEAD = "copy the tensor first (tensor.cpu())"
TRACEBACK = "Fatal Python error: Segmentation fault"


@pytest.mark.drawn(3)
@pytest.mark.parametrize("how", ["follow", "through_numpy", "with_faulthandler_no_more"])
def test_a_device_pointer_followed_by_the_host_is_explained_before_the_process_dies(
    how: str, followed: dict[str, Any]
) -> None:
    status, text = followed[how]
    assert status == -signal.SIGSEGV
    assert text.startswith(SENTENCE) and INSTEAD in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("how", ["before", "after", "before_and_after"])
def test_faulthandler_still_reports_where(how: str, followed: dict[str, Any]) -> None:
    status, text = followed[f"with_faulthandler_{how}"]
    assert status == -signal.SIGSEGV
    assert text.count(SENTENCE) == 1 and text.count(TRACEBACK) == 1
    assert "in follow" in text


def test_a_handler_of_the_scripts_own_has_the_last_word(followed: dict[str, Any]) -> None:
    status, text = followed["with_a_handler_of_the_script_before"]
    assert status == 42 and SENTENCE in text


@pytest.mark.parametrize("how", ["a pointer to nowhere", "a signal that was sent"])
def test_any_other_segmentation_fault_is_left_as_it_was(how: str, followed: dict[str, Any]) -> None:
    assert followed[how] == [-signal.SIGSEGV, ""]
    status, text = followed["a pointer to nowhere, with faulthandler"]
    assert status == -signal.SIGSEGV and TRACEBACK in text and SENTENCE not in text
