"""Mistakes in variables, versions, devices and ranks: one sentence each, which says what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import proxied
import pytest
from proxied import WORKLOADS, python
from training_run import ROOT

from understudy.proxy_client import placement, variables
from understudy.proxy_client.placement import Placement
from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.config.proxyd_settings import settings_of

IMPOSSIBLE = {
    "UNDERSTUDY_SOCKET": ["/tmp/directory/"],
    "UNDERSTUDY_SHARED_MEMORY": ["shm", "/no/such/place"],
    "UNDERSTUDY_JOB": ["a b", "x" * 65, "näme"],
    "UNDERSTUDY_HOME": ["/no/such/place"],
    "UNDERSTUDY_PYTHON": ["/no/such/python", "/etc"],
    "UNDERSTUDY_DEVICE_COUNT": ["two", "-1", "1025", "1.5"],
    "UNDERSTUDY_CAPABILITY": ["{", "[]", "cpu"],
    "UNDERSTUDY_AUTO_COMMIT_BYTES": ["64MiB", "0", "-5"],
    "UNDERSTUDY_SPIN_US": ["fast", "-1", "10000000000"],
    "UNDERSTUDY_STATISTICS": ["yes", "2"],
    "UNDERSTUDY_LOG_LEVEL": ["loud", "ERROR"],
    "UNDERSTUDY_HISTORY": ["history.jsonl", "/tmp", "/no/such/directory/"],
    "UNDERSTUDY_SAMPLES": ["samples", "./samples"],
    "UNDERSTUDY_SAMPLES_ATTEMPT": ["0", "-1", "one"],
    "UNDERSTUDY_RELAYS": ["/no/such/directory", "/etc/passwd"],
    "UNDERSTUDY_RELAY": ["/tmp/directory/"],
    "UNDERSTUDY_CRIU": ["/no/such/criu", "/etc"],
    "UNDERSTUDY_TEST_DRIVER": ["gpu"],
    "UNDERSTUDY_TEST_SHARED_GPU": ["yes"],
    "UNDERSTUDY_TEST_SEED": ["random"],
}
POSSIBLE = {
    "UNDERSTUDY_SOCKET": "/tmp/proxyd.sock",
    "UNDERSTUDY_SHARED_MEMORY": "/dev/shm",
    "UNDERSTUDY_JOB": "0123abc",
    "UNDERSTUDY_HOME": "/tmp",
    "UNDERSTUDY_PYTHON": sys.executable,
    "UNDERSTUDY_DEVICE_COUNT": "2",
    "UNDERSTUDY_CAPABILITY": '{"driver": "cpu"}',
    "UNDERSTUDY_AUTO_COMMIT_BYTES": "1048576",
    "UNDERSTUDY_SPIN_US": "0",
    "UNDERSTUDY_STATISTICS": "1",
    "UNDERSTUDY_LOG_LEVEL": "debug",
    "UNDERSTUDY_HISTORY": "/tmp/history.jsonl",
    "UNDERSTUDY_SAMPLES": "/tmp/samples",
    "UNDERSTUDY_SAMPLES_ATTEMPT": "3",
    "UNDERSTUDY_RELAYS": "/tmp",
    "UNDERSTUDY_RELAY": "/tmp/r1/s",
    "UNDERSTUDY_CRIU": "/bin/true",
    "UNDERSTUDY_TEST_DRIVER": "cuda",
    "UNDERSTUDY_TEST_SHARED_GPU": "1",
    "UNDERSTUDY_TEST_SEED": "7",
}
NAMES = [variable.name for variable in variables.VARIABLES]


def sources() -> list[Path]:
    folders = ("proxy_client", "proxy_server", "recovery", "replay", "tests", "bench")
    return [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cpp", ".h") and file.name != Path(__file__).name
    ]


# ------------------------------------------------------------------ variables
def test_every_variable_that_our_code_reads_is_known_and_none_is_known_for_nothing() -> None:
    read = set()
    for file in sources():
        if file.name != "variables.py":
            read |= set(re.findall(r'[\'"`](UNDERSTUDY_[A-Z_]+)[\'"`=]', file.read_text()))
    # Tests pass further names of the first to scripts of their own; the second are options of proxyd.
    others = ("UNDERSTUDY_TEST_", "UNDERSTUDY_PROXYD_")
    assert {name for name in read if name in NAMES or not name.startswith(others)} == set(NAMES)


def test_every_variable_that_the_documentation_lists_is_known() -> None:
    text = (ROOT / "docs" / "design" / "overview.md").read_text()
    assert set(re.findall(r"`(UNDERSTUDY_[A-Z_]+)`", text)) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_impossible_value_is_named_and_a_possible_one_is_not(name: str) -> None:
    for value in IMPOSSIBLE[name]:
        sentence = variables.complaint({name: value})
        assert sentence.startswith(f"{name}={value!r} is not possible: it must be "), sentence
    assert not variables.complaint({name: POSSIBLE[name]})
    assert not variables.complaint({name: ""}), "empty counts as unset"


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    assert variables.unknown({"UNDERSTUDY_SPIN_MS": "1"}) == [
        "the environment variable UNDERSTUDY_SPIN_MS is not known and has no effect: "
        "is UNDERSTUDY_SPIN_US meant?"
    ]
    assert not variables.unknown(dict.fromkeys((*NAMES, "UNDERSTUDY_TEST_ANYTHING", "PATH"), "1"))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("proxyrun", ["true"]), ("proxyd", ["--devices", "cpu:1"]), ("recoveryctl", ["status"])],
)
def test_a_command_refuses_an_impossible_value_and_warns_of_an_unknown_name(
    module: str, arguments: list[str], tmp_path: Path
) -> None:
    mistaken = {
        "UNDERSTUDY_SPIN_US": "fast",
        "UNDERSTUDY_SOKET": "x",
        "UNDERSTUDY_SOCKET": str(tmp_path / "none"),
    }
    done = subprocess.run(
        [*module_command(f"recovery.{module}"), *arguments],
        env=os.environ | mistaken,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    warning, error = done.stderr.strip().splitlines()
    assert warning == f"{module}: " + variables.unknown({"UNDERSTUDY_SOKET": ""})[0]
    assert error == f"{module}: " + variables.complaint({"UNDERSTUDY_SPIN_US": "fast"})


def test_a_worker_refuses_an_impossible_value_when_it_imports_torch(tmp_path: Path) -> None:
    command = ["env", "UNDERSTUDY_AUTO_COMMIT_BYTES=64MiB", *python("-c", "import torch")]
    ended = proxied.run(command, folder=tmp_path)
    assert ended.status == 1
    assert (
        "ValueError: UNDERSTUDY_AUTO_COMMIT_BYTES='64MiB' is not possible: "
        "it must be a whole number of bytes, at least 1 (or unset)\n"
    ) in ended.output


# ------------------------------------------------------------------ one worker, many mistakes
@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    ended = proxied.run(
        python(WORKLOADS / "bad_input.py"),
        folder=tmp_path_factory.mktemp("mistakes"),
        options=("--devices", "cpu:2"),
    )
    found: dict[str, list[str]] = ended.result()
    return found


def test_two_versions_of_pytorch_are_refused_with_both_named(mistakes: dict[str, list[str]]) -> None:
    kind, message = mistakes["another PyTorch"]
    assert kind == "RuntimeError"
    assert re.fullmatch(
        r"the script runs PyTorch 2\.12\.1\+cpu and proxyd's device servers PyTorch 2\.\d+\.\d+\S*: "
        r"install the same version for both",
        message,
    )


def test_a_rank_that_is_no_number_is_named(mistakes: dict[str, list[str]]) -> None:
    kind, message = mistakes["an impossible rank"]
    assert kind == "RuntimeError" and message.startswith("rank 'first' of '1' is not possible")


@pytest.mark.parametrize("how", ["", " by to()", " by set_device()", " by cuda()", " later"])
def test_a_device_that_does_not_exist_is_answered_as_cuda_does_with_how_many_there_are(
    how: str, mistakes: dict[str, list[str]]
) -> None:
    kind, message = mistakes["cuda:7" + how]
    assert kind in ("RuntimeError", "AcceleratorError")
    assert message.startswith("CUDA error: invalid device ordinal")
    assert "there is no cuda:7, this worker sees 2 device(s)" in message


@pytest.mark.parametrize("how", ["", " by to()"])
def test_a_second_device_in_one_process_is_refused_with_the_way_out(
    how: str, mistakes: dict[str, list[str]]
) -> None:
    kind, message = mistakes["a second device" + how]
    assert kind == "RuntimeError"
    assert message.startswith("this worker is bound to cuda:0 and cannot use cuda:1")
    assert "start one process per device (torchrun --nproc-per-node N)" in message


@pytest.mark.parametrize("what", ["a new tensor", "an old tensor", "a value", "synchronize"])
def test_a_forked_child_is_told_what_cuda_tells_it(what: str, mistakes: dict[str, list[str]]) -> None:
    assert mistakes[f"fork, {what}"] == [
        "RuntimeError",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        "'spawn' start method",
    ]


@pytest.mark.drawn(2)
def test_a_process_beside_the_one_that_uses_its_device_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, torch\n"
        "print('sum', torch.ones(2, device='cuda').sum().item(), flush=True)\n"
        "command = [sys.executable, __file__, 'another']\n"
        "if len(sys.argv) == 1: sys.exit(subprocess.run(command).returncode)\n"
    )
    ended = proxied.run(python(script), folder=tmp_path)
    assert ended.status == 1
    assert ended.output.count("sum 2.0") == 1
    assert re.search(r"rank 0 asked for cuda:0, which rank 0 of job [\w-]+ \(pid \d+\) holds", ended.output)


@pytest.mark.parametrize(("place", "why"), [
    ("/no/such/place", "No such file or directory"), ("/proc", "no file can be made and mapped"),
    ("/tmp/" + 60 * "x", r"more than \d+ bytes"),
])  # fmt: skip
def test_a_place_for_logs_where_none_can_lie_is_refused_in_a_sentence(place: str, why: str) -> None:
    with pytest.raises(BadInput, match=f"--log-dir {place}: .*{why}"):
        settings_of(["--devices", "cpu:1", "--log-dir", place])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a pid namespace")
def test_a_migratable_job_whose_logs_lie_on_a_disk_is_refused_before_it_begins(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="understudy-test-") as disk:
        options = ("--devices", "cpu:1", "--migratable", "--log-dir", disk)
        ended = proxied.run(python("-c", "print('began')"), folder=tmp_path, options=options)
    assert (ended.status, ended.output.count("began")) == (4, 0)
    assert "--migratable needs its logs in" in ended.output and "(--log-dir)" in ended.output


# ------------------------------------------------------------------ CUDA_VISIBLE_DEVICES
@pytest.mark.drawn(3)
def test_visible_devices_are_those_that_cuda_would_show(tmp_path: Path) -> None:
    counts = {None: 2, "": 0, "0": 1, "1": 1, "1,0": 2, "-1": 0, "0,-1,1": 1, "0,0": 0, "7": 0}
    ended = proxied.run(
        python(WORKLOADS / "visible_devices.py", json.dumps(list(counts))),
        folder=tmp_path,
        options=("--devices", "cpu:2"),
    )
    seen = ended.result()
    assert [child["count"] for child in seen] == list(counts.values())
    assert [child["available"] for child in seen] == [count > 0 for count in counts.values()]
    used = [child for child in seen if "works" in child]
    assert all(child["works"] and child["current"] == 0 for child in used)
    devices = [rank["device"] for rank in ended.report["ranks"]]
    assert devices == ["cpu:0", "cpu:1", "cpu:1"] and len(used) == 3


# ------------------------------------------------------------------ which rank a worker is
def test_a_worker_is_the_rank_that_its_launcher_says() -> None:
    assert placement._of_launcher({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == Placement(3, 4)
    assert placement._of_launcher({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}) == Placement(1, 2)
    assert placement._of_launcher({"WORLD_SIZE": "2"}) is None


def test_a_process_that_a_script_started_is_the_rank_of_its_device() -> None:
    assert placement._of_started_process(True, device_index=1, device_count=2) == Placement(1, 2)
    assert placement._of_started_process(True, device_index=0, device_count=1) == Placement(0, 1)
    assert placement._of_started_process(False, device_index=1, device_count=2) == Placement(0, 1)
