"""What real scripts do, scenario by scenario: natively, under the proxy, and with a server killed in it.

The scenarios of some groups (tests/workloads/real_scripts) share three processes, because most of the time
goes into starting PyTorch; each scenario is a test of its own all the same.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxied
import pytest
from compiled_programs import program
from training_run import BIN

FOLDER = proxied.WORKLOADS / "real_scripts"
GROUPS = {
    "optimizing": (
        "gradient_accumulation",
        "several_optimizers_that_step_in_turns",
        "every_optimizer_of_pytorch_takes_three_steps",
        "closures_of_lbfgs",
        "learning_rate_schedulers",
        "gradient_clipping",
        "averaged_weights",
    ),
    "memory": (
        "checkpoint_that_is_not_reentrant",
        "checkpoint_that_is_reentrant",
        "checkpoint_that_draws_new_random_numbers",
        "checkpoint_of_a_sequence",
        "saved_tensors_on_the_host",
        "autocast_to_bfloat16_equals_autocast_on_the_cpu",
        "gradient_scaler_skips_a_step_whose_gradients_overflow",
        "autocast_for_cuda_equals_its_casts_written_out",
        "old_names_of_mixed_precision",
    ),
    "recurrent": (
        "recurrent_layers_of_every_kind",
        "packed_sequences",
        "recurrent_layers_with_dropout_between_them",
        "recurrent_layers_in_double_and_bfloat16",
        "recurrent_cells",
        "second_derivative_of_a_gru",
        "ctc_loss",
        "embedding_bags",
    ),
    "loading": (
        "loader_whose_workers_are_forked",
        "loader_whose_workers_are_spawned",
        "loader_whose_workers_come_from_a_fork_server",
        "loader_of_a_stream",
        "pinned_memory_and_copies_that_do_not_block",
        "tensors_made_from_lists_and_arrays",
        "streams_and_events",
        "memory_statistics_of_the_device",
        "properties_of_the_device",
        "random_number_generators",
        "legacy_warnings_are_few",
        "saving_and_loading_a_training",
        "loading_to_another_place",
        "copying_and_pickling",
    ),
    "programming": (
        "gradients_per_sample",
        "training_by_pure_functions",
        "jacobians_and_directions",
        "ensembles_by_vmap",
        "randomness_under_vmap",
        "hooks_of_every_kind",
        "optimizer_steps_inside_backward",
        "parametrizations_and_pruning",
        "functions_with_derivatives_of_their_own",
        "child_of_a_process_that_used_the_device",
    ),
    "extending": (
        "operators_written_in_python",
        "operators_written_in_cpp",
        "operators_without_a_kernel_for_the_device",
        "compiled_by_backends_that_need_no_compiler",
        "compiled_by_default_falls_back_to_eager_with_one_warning",
        "profiled_training",
    ),
}
RUNS = (("optimizing", "recurrent"), ("memory", "programming"), ("loading",), ("extending",))
"""Groups that share processes."""
SCENARIOS = [(group, name) for group, names in GROUPS.items() for name in names]


@dataclass(frozen=True)
class Outcome:
    """Results of one of `RUNS`: scenario -> what it kept, in each of the three runs."""

    native: dict[str, Any]
    undisturbed: dict[str, Any]
    killed: dict[str, Any]
    killed_in: dict[str, tuple[int, int]]
    """Scenario -> (minibatch, record of it) at which the device server was killed."""
    report: dict[str, Any]
    cpu_branches: dict[str, int]


def command(groups: tuple[str, ...], device: str, out: Path) -> list[str]:
    script = FOLDER / "run_scenarios.py"
    return proxied.python(script, "--groups", ",".join(groups), "--device", device, "--out", str(out))


def native_run(groups: tuple[str, ...], folder: Path) -> dict[str, Any]:
    out = folder / "native.json"
    done = subprocess.run(
        command(groups, "cpu", out),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    results: dict[str, Any] = json.loads(out.read_text())["scenarios"]
    return results


def proxied_run(
    groups: tuple[str, ...], folder: Path, name: str, drills: tuple[str, ...] = ()
) -> tuple[Any, proxied.Ended]:
    out = folder / f"{name}.json"
    options = tuple(word for drill in drills for word in ("--drill", drill))
    ended = proxied.run(command(groups, "cuda", out), folder=folder, options=options, timeout_s=200)
    assert ended.status == 0, ended.output[-3000:]
    return json.loads(out.read_text()), ended


def middle(results: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each scenario the minibatch in the middle, and the record in its middle."""
    places = {}
    for name, result in results.items():
        sizes = result["records_of_steps"]
        if sizes:
            index = len(sizes) // 2
            places[name] = (result["steps_before"] + index + 1, max(sizes[index] // 2, 1))
    return places


@functools.cache
def outcome(groups: tuple[str, ...], folder: Path) -> Outcome:
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as both:
        native = both.submit(native_run, groups, folder)
        undisturbed = both.submit(proxied_run, groups, folder, "undisturbed")
        results = undisturbed.result()[0]
        places = middle(results["scenarios"])
        drills = tuple(f"kill-server rank=0 step={step} call={call}" for step, call in places.values())
        killed, ended = proxied_run(groups, folder, "killed", drills)
        return Outcome(
            native.result(),
            results["scenarios"],
            killed["scenarios"],
            places,
            ended.report,
            results["cpu_branches"],
        )


@pytest.fixture
def library() -> Path:
    """The C++ operators of the scenarios."""
    return program("libunderstudy_test.so")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-scripts")


@pytest.fixture
def group_outcome(
    group: str, outcomes: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Outcome:
    (groups,) = (run for run in RUNS if group in run)
    if "extending" in groups:
        monkeypatch.setenv("UNDERSTUDY_TEST_LIBRARY", str(request.getfixturevalue("library")))
    return outcome(groups, outcomes / groups[0])


@pytest.mark.drawn(10, by="group")
@pytest.mark.parametrize(("group", "name"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_a_scenario_gives_the_bits_of_native_pytorch(name: str, group_outcome: Outcome) -> None:
    native, under_proxy = group_outcome.native[name], group_outcome.undisturbed[name]
    assert native["error"] == ""
    assert under_proxy["error"] == ""
    assert native["kept"], "a scenario that keeps nothing shows nothing"
    assert under_proxy["kept"] == native["kept"]


@pytest.mark.drawn(10, by="group")
@pytest.mark.parametrize(("group", "name"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_a_scenario_survives_the_death_of_its_device_server(name: str, group_outcome: Outcome) -> None:
    assert group_outcome.killed[name]["error"] == ""
    assert group_outcome.killed[name]["kept"] == group_outcome.native[name]["kept"]
    step = group_outcome.killed_in[name][0]
    recoveries = [r for r in group_outcome.report["recoveries"] if r["step"] == step]
    assert len(recoveries) == 1, f"no kill struck minibatch {step}: {group_outcome.report['recoveries']}"
    assert recoveries[0]["recovered"]
    assert group_outcome.report["replies_different"] == 0


@pytest.mark.drawn(10, by="group")
@pytest.mark.parametrize(("groups", "group"), [(groups, groups[0]) for groups in RUNS])
def test_every_scenario_of_a_group_is_listed_here(groups: tuple[str, ...], group_outcome: Outcome) -> None:
    listed = [name for group in groups for name in GROUPS[group]]
    assert list(group_outcome.native) == listed
    assert len(group_outcome.report["recoveries"]) == len(listed)


@pytest.mark.parametrize("group", ["recurrent"])
def test_no_row_of_the_table_of_cpu_branches_is_dead(group_outcome: Outcome) -> None:
    unused = [name for name, uses in group_outcome.cpu_branches.items() if uses == 0]
    assert unused == []
    assert len(group_outcome.cpu_branches) == 15


@pytest.mark.drawn(2)
def test_a_script_leaves_nothing_of_its_library_in_the_next_session(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device server that ran a script's own library is not handed to another session."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "torch.ops.load_library(os.environ['UNDERSTUDY_TEST_LIBRARY'])\n"
        "x = torch.ones(4, device='cuda')\n"
        "print(torch.ops.understudy_test.scale(x, 2.0).sum().item())\n"
    )
    monkeypatch.setenv("UNDERSTUDY_TEST_LIBRARY", str(library))
    twice = f"for _ in 1 2; do {BIN / 'python'} {script}; done"
    ended = proxied.run(["bash", "-c", twice], folder=tmp_path, options=("--devices", "cpu:1"))
    assert ended.status == 0, ended.output[-3000:]
    assert ended.output.count("12.0") == 2


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("mode", "message"),
    [(0o777, "others could write it"), (0o755, "12.0")],
    ids=["writable by others", "private"],
)
def test_a_library_that_others_could_write_is_not_loaded(
    mode: int, message: str, library: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.read_bytes())
    copy.chmod(mode)
    script = tmp_path / "script.py"
    script.write_text(
        f"import torch\ntorch.ops.load_library({str(copy)!r})\n"
        "x = torch.ones(4, device='cuda')\n"
        "print(torch.ops.understudy_test.scale(x, 2.0).sum().item())\n"
    )
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    assert message in ended.output, ended.output[-3000:]
