"""Our own calls of NCCL (--collectives own): of a stand-in for its library, on a simulated CUDA device.

What they share with PyTorch's is in test_simulated_cuda.py, under both. Nothing of it is a GPU's result.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import proxied
import pytest
import simulated_device
from compiled_programs import BUILT, program
from simulated_case import does

from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.host.spawner import default_command
from understudy.recovery.membership.network.data_network import DataNetwork

pytestmark = pytest.mark.drawn(8)

ABORTED = "NCCL's communicator was aborted"
SENTENCES = (
    "a collective has tensors that do not fit together",
    "a collective has the wrong number of tensors",
    "a collective names a rank outside its communicator",
    "a collective splits its tensors impossibly",
    "a tensor reaches 68 bytes into a buffer of 64",
    "a message has the wrong number of tensors",
    "a message names an impossible rank",
    "Cannot use ReduceOp.BAND with NCCL",
    "Input tensor data type is not supported for NCCL process group: Short",
    "NCCL does not support recvAnysource",
    "unknown handle 99",
    "unknown collective",
    "unknown reduction",
)
"""In which a device server refuses collectives."""
INSTEAD = "; install the CUDA build of PyTorch, which brings one, or leave out --collectives own"


@pytest.fixture(autouse=True)
def told(simulated_gpus: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in says which communicators it begins and ends."""
    monkeypatch.setenv("SIMULATED_NCCL_TOLD", str(folder / "told"))
    return folder / "told"


def said_by(case: str, **variables: str) -> list[str]:
    done = does(case, "own_collective_cases.py", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def with_nccl(folder: Path) -> str:
    """LD_LIBRARY_PATH with another libnccl.so.2."""
    return os.pathsep.join([str(folder), os.environ["LD_LIBRARY_PATH"].partition(os.pathsep)[0]])


@pytest.mark.parametrize(("case", "ranks"), [("every_kind_of_two", 2), ("every_kind_of_three", 3)])
def test_each_collective_has_the_result_that_it_is_to_have(case: str, ranks: int) -> None:
    assert said_by(case) == [str([0] * ranks)]


@pytest.mark.parametrize(
    ("library", "hangs"),
    [
        pytest.param(simulated_device.NCCL, "0", id="revoked"),
        pytest.param(simulated_device.NCCL, "2", id="hangs"),
        pytest.param("older_nccl_library", "0", id="aborted"),
    ],
)
def test_what_is_aborted_ends_soon_also_where_nothing_can_be_revoked(library: str, hangs: str) -> None:
    path = with_nccl(program(library))
    said = said_by("aborted_amid_a_collective", LD_LIBRARY_PATH=path, SIMULATED_NCCL_HANG=hangs)
    assert said == [ABORTED, "True True", "False"]


@pytest.mark.parametrize("slowly", ["0", "30000"])
def test_who_connects_to_a_peer_that_does_not_come_leaves_as_soon_as_it_is_aborted(slowly: str) -> None:
    assert said_by("unanswered", SIMULATED_NCCL_INIT_MS=slowly) == ["False", ABORTED, "True True"]


def test_a_group_that_is_given_up_does_first_what_it_was_asked_for_and_ends_then(told: Path) -> None:
    assert said_by("given_up_amid_a_collective") == ["[0, 0]"]
    assert sorted(told.read_text().split()) == ["begun"] * 2 + ["destroyed"] * 2


@pytest.mark.parametrize(
    ("library", "refuses", "ends"),
    [
        pytest.param(simulated_device.NCCL, "", "destroyed", id="revoked"),
        pytest.param(simulated_device.NCCL, "revoke", "aborted", id="not revoked"),
        pytest.param("older_nccl_library", "", "aborted", id="aborted"),
    ],
)
def test_a_group_that_is_given_up_behind_an_abort_ends_once(
    library: str, refuses: str, ends: str, told: Path
) -> None:
    path = with_nccl(program(library))
    said = said_by("given_up_behind_an_abort", LD_LIBRARY_PATH=path, SIMULATED_NCCL_REFUSES=refuses)
    assert said == ["True True"]
    assert told.read_text().split() == ["begun", "begun", ends]


def test_who_is_never_ready_is_waited_for_no_longer_than_is_asked_for() -> None:
    assert said_by("never_ready") == ["NCCL was not ready within 200 ms"]


def test_a_call_that_nccl_refuses_is_told_and_leaves_the_group_in_order() -> None:
    words = "NCCL: invalid usage (run with NCCL_DEBUG=WARN for details)"
    assert said_by("refused_calls", SIMULATED_NCCL_REFUSES="call") == [words, words, "[0, 0]"]


def test_a_group_of_calls_that_does_not_start_is_told_and_takes_no_more() -> None:
    words = "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details) (a cable)"
    said = said_by("refused_calls", SIMULATED_NCCL_REFUSES="group_end", SIMULATED_NCCL_LAST_ERROR="a cable")
    assert said == [words, "NCCL's communicator is not ready", "[0, 0]"]


@pytest.mark.parametrize(("more", "told_too"), [("", ""), ("a cable", " (a cable)")])
def test_a_peer_that_is_gone_is_told_in_the_words_of_nccl(more: str, told_too: str) -> None:
    words = f"NCCL: remote process exited or there was a network error{told_too}"
    said = said_by("peer_gone", SIMULATED_NCCL_TELLS="1", SIMULATED_NCCL_LAST_ERROR=more)
    assert said == ["True", words, "[0, 0]"]


def test_what_nccl_does_not_have_is_refused_in_the_words_of_pytorch() -> None:
    assert said_by("no_such_reduction") == [
        "Cannot use ReduceOp.BAND with NCCL",
        "Cannot use ReduceOp.AVG with boolean inputs",
        "Input tensor data type is not supported for NCCL process group: Short",
        "[0, 0]",
    ]


@pytest.fixture
def no_nccl(folder: Path) -> str:
    """LD_LIBRARY_PATH with a file in front that is none: where a machine has NCCL, that is not found."""
    (folder / "libnccl.so.2").write_text("not a library")
    return with_nccl(folder)


@pytest.mark.drawn(1)
def test_a_record_of_a_collective_that_makes_no_sense_is_refused_in_a_sentence() -> None:
    done = does("all", "hostile_collectives.py", "own")
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(answers) == 49
    refused = {what: [one for one in SENTENCES if one in answer] for what, answer in answers.items()}
    assert {what: answers[what] for what, sentences in refused.items() if len(sentences) != 1} == {}
    assert {sentences[0] for sentences in refused.values()} == set(SENTENCES)


def test_a_library_that_cannot_be_loaded_is_too_old_or_incomplete_is_one_sentence(no_nccl: str) -> None:
    program("stand_in_nccl")
    incomplete = BUILT / "stand_in_cuda"
    (none,) = said_by("version", LD_LIBRARY_PATH=no_nccl)
    assert none.startswith("NCCL cannot be loaded (") and none.endswith(INSTEAD)
    assert said_by("version", SIMULATED_NCCL_VERSION="21602") == [
        f"libnccl.so.2 is NCCL 2.16.2, and 2.18.1 or newer is needed{INSTEAD}"
    ]
    (incomplete_said,) = said_by("version", LD_LIBRARY_PATH=with_nccl(incomplete))
    assert incomplete_said.startswith("libnccl.so.2 has no nccl") and incomplete_said.endswith(INSTEAD)


def test_proxyd_says_at_its_start_that_it_finds_no_nccl(
    folder: Path, no_nccl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", no_nccl)
    options = ("--devices", "cuda:1", "--collectives", "own")
    done = proxied.run([sys.executable, "-c", ""], folder=folder, options=options, timeout_s=100)
    assert done.status != 0
    assert "NCCL cannot be loaded" in done.output and INSTEAD in done.output


@pytest.mark.drawn(1)
def test_pytorchs_calls_are_the_default_and_ours_reach_the_device_servers() -> None:
    chosen = [settings_of(["--devices", "cuda:1", *more]) for more in ([], ["--collectives", "own"])]
    assert [one.collectives for one in chosen] == ["pytorch", "own"]
    commands = [
        default_command(
            one.socket, one.log_directory, "cuda", one.adoption_grace_s, DataNetwork(), one.exact,
            one.collectives,
        )
        for one in chosen
    ]  # fmt: skip
    assert ["--own-collectives" in command for command in commands] == [False, True]
