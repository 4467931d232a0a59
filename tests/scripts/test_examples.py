"""The examples are ordinary scripts: alone, without the proxy, they run and repeat themselves exactly."""

import json
import re
import sys
from pathlib import Path

import pytest
from places import ROOT
from training_run import execute_natively

pytestmark = pytest.mark.drawn(8)

EXAMPLES = ROOT / "examples"
PATTERN = re.compile(r"[0-9a-f]{8}")
OURS = ("proxy_client", "proxy_server", "protos", "replay", "recovery", "understudy")
TINY = {
    "char_gpt.py": "--batch-size 2 --block-size 16 --layers 2 --heads 2 --width 16 --dropout 0.1",
    "digits_convnet.py": "--batch-size 16 --width 4 --dropout 0.1",
}


def train(script: str, ranks: int, losses: Path, steps: int = 5, seed: int = 1) -> list[list[str]]:
    """The losses of every rank and step, as bits, of one native run on the CPU."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        *launcher,
        str(EXAMPLES / script),
        "--device=cpu",
        f"--steps={steps}",
        f"--seed={seed}",
        f"--losses={losses}",
        f"--timings={losses}.timings",
        *TINY[script].split(),
    ]
    execute_natively(command, 120)
    files = [losses] + [losses.with_name(f"{losses.name}.rank{rank}") for rank in range(1, ranks)]
    return [file.read_text().split() for file in files]


def assert_trained(losses: list[list[str]], steps: int) -> None:
    assert [len(of_rank) for of_rank in losses] == [steps] * len(losses)
    assert all(PATTERN.fullmatch(loss) for of_rank in losses for loss in of_rank)
    assert len({tuple(of_rank) for of_rank in losses}) == len(losses), "ranks must see different data"
    assert len(set(losses[0])) > 1, "losses do not change: nothing is trained"


@pytest.mark.parametrize("script", sorted(TINY))
def test_the_same_command_gives_the_same_losses_and_another_seed_others(script: str, tmp_path: Path) -> None:
    first, second = (train(script, 1, tmp_path / name) for name in ("first", "second"))
    other = train(script, 1, tmp_path / "other", seed=2)

    assert_trained(first, 5)
    assert first == second
    assert first != other
    seconds = json.loads((tmp_path / "first.timings").read_text())
    assert len(seconds) == 5
    assert all(second > 0 for second in seconds)


@pytest.mark.parametrize("script", sorted(TINY))
def test_two_ranks_train_on_different_data(script: str, tmp_path: Path) -> None:
    """That they repeat themselves as well is seen in tests/scripts/test_training.py."""
    assert_trained(train(script, 2, tmp_path / "losses"), 5)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("script", sorted(TINY))
def test_no_example_knows_of_this_project(script: str) -> None:
    text = (EXAMPLES / script).read_text().lower()

    assert not [name for name in OURS if re.search(rf"\b{name}\b", text)]
