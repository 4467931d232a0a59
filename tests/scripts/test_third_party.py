"""Programs that others wrote, as they come from PyPI: under the proxy the same bits as natively.

Losses and a digest of every final weight are compared with the same script on the CPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import proxied
import pytest
from native_reference import native_reference
from proxied import WORKLOADS, python, torchrun
from training_run import BIN, ROOT

pytestmark = pytest.mark.drawn(3)

SCRIPTS = WORKLOADS / "third_party"
TEXT = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
DRILL = ("--drill", "kill-server rank=1 step=3 call=40")
TWO_DEVICES = ("--devices", "cpu:2")


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{' and '.join(missing)} not installed: pip install .[test]"
    )


def accelerate_launch(script: Path, *arguments: str) -> list[str]:
    return [str(BIN / "accelerate"), "launch", "--num_processes", "2", str(script), *arguments]


def results(folder: Path, ranks: int) -> list[list[str]]:
    """What each rank wrote: never empty, and never two equal losses in a row, so something was trained."""
    found = [folder.joinpath(f"out.{rank}").read_text().splitlines() for rank in range(ranks)]
    losses = [line for line in found[0] if line.startswith("loss")]
    assert len(losses) >= 6 and len(set(losses)) > 3, found[0]
    assert len(found[0]) > len(losses), "no weights"
    return found


def native(command: list[str], ranks: int) -> list[list[str]]:
    made = native_reference(lambda folder: [*command, "--device", "cpu", "--out", str(folder / "out")])
    return results(made, ranks)


def under_proxy(
    command: list[str], folder: Path, ranks: int, *options: str
) -> tuple[list[list[str]], proxied.Ended]:
    folder.mkdir()
    ended = proxied.run(
        [*command, "--out", str(folder / "out")], folder=folder, options=options, timeout_s=120
    )
    assert ended.status == 0, ended.output[-5000:]
    return results(folder, ranks), ended


def assert_recovered(ended: proxied.Ended) -> None:
    recoveries = ended.report["recoveries"]
    assert [recovery["recovered"] for recovery in recoveries] == [True], ended.report


def text() -> list[str]:
    return ["--text", str(TEXT)] if TEXT.exists() else []


@needs("transformers", "accelerate")
@pytest.mark.long
def test_hugging_face_trainer_in_one_process(tmp_path: Path) -> None:
    command = python(SCRIPTS / "hf_trainer.py", *text())
    expected = native(command, 1)
    found, _ = under_proxy(command, tmp_path / "proxied", 1)
    assert found == expected


@needs("transformers", "accelerate")
@pytest.mark.long
def test_hugging_face_trainer_on_two_ranks_survives_a_killed_server(tmp_path: Path) -> None:
    command = torchrun(2, SCRIPTS / "hf_trainer.py", *text())
    expected = native(command, 2)
    found, ended = under_proxy(command, tmp_path / "proxied", 2, *DRILL)
    assert found == expected
    assert_recovered(ended)


LIGHTNING = SCRIPTS / "lightning_ddp.py"


@pytest.fixture(scope="module")
def lightning_natively() -> list[list[str]]:
    return native(python(LIGHTNING), 2)


@needs("lightning")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        pytest.param(python(LIGHTNING), TWO_DEVICES, id="processes of its own"),
        pytest.param(torchrun(2, LIGHTNING), (), id="of torchrun", marks=pytest.mark.long),
    ],
)
def test_lightning_survives_a_killed_server(
    command: list[str], options: tuple[str, ...], lightning_natively: list[list[str]], tmp_path: Path
) -> None:
    found, ended = under_proxy(command, tmp_path / "proxied", 2, *options, *DRILL)
    assert found == lightning_natively
    assert_recovered(ended)


@needs("accelerate")
def test_accelerate_launch_without_a_configuration_survives_a_killed_server(tmp_path: Path) -> None:
    script = SCRIPTS / "accelerated.py"
    expected = native(torchrun(2, script), 2)
    found, ended = under_proxy(accelerate_launch(script), tmp_path / "drilled", 2, *DRILL)
    assert found == expected
    assert_recovered(ended)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        pytest.param([], (), marks=pytest.mark.long),
        (["--device-first"], ("--drill", "kill-server rank=1 step=3 call=9")),
    ],
    ids=["group first", "device first, server killed"],
)
def test_a_script_that_spawns_its_ranks_itself(
    arguments: list[str], options: tuple[str, ...], tmp_path: Path, spawned_natively: list[bytes]
) -> None:
    command = python(WORKLOADS / "spawned_ranks.py", *arguments, "--out", str(tmp_path / "out"))
    ended = proxied.run(command, folder=tmp_path, options=(*TWO_DEVICES, *options))
    assert ended.status == 0, ended.output[-5000:]
    assert [(tmp_path / f"out.{rank}").read_bytes() for rank in (0, 1)] == spawned_natively
    if options:
        assert_recovered(ended)


@pytest.fixture(scope="module")
def spawned_natively() -> list[bytes]:
    command = python(WORKLOADS / "spawned_ranks.py", "--device", "cpu", "--out")
    folder = native_reference(lambda made: [*command, str(made / "out")])
    content = [(folder / f"out.{rank}").read_bytes() for rank in (0, 1)]
    assert content[0] != content[1], "the ranks see different data"
    return content
