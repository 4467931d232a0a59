"""The examples are ordinary scripts: alone, without the proxy, they run and repeat themselves exactly."""

import json
import re
import sys
from pathlib import Path

import pytest
from training_run import execute_natively

EXAMPLES = Path(__file__).parent.parent / "examples"
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", sorted(TINY))
def test_the_same_command_gives_the_same_losses_bit_for_bit(script: str, ranks: int, tmp_path: Path) -> None:
    first = train(script, ranks, tmp_path / "first")
    second = train(script, ranks, tmp_path / "second")

    assert first == second
    assert [len(losses) for losses in first] == [5] * ranks
    assert all(PATTERN.fullmatch(loss) for losses in first for loss in losses)
    assert len({tuple(losses) for losses in first}) == ranks, "ranks must see different data"
    assert len(set(first[0])) > 1, "losses do not change: nothing is trained"


@pytest.mark.parametrize("script", sorted(TINY))
def test_another_seed_gives_other_losses_and_each_step_has_a_timing(script: str, tmp_path: Path) -> None:
    one = train(script, 1, tmp_path / "one", steps=3)
    other = train(script, 1, tmp_path / "other", steps=3, seed=2)

    assert one != other
    seconds = json.loads((tmp_path / "one.timings").read_text())
    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)


@pytest.mark.parametrize("script", sorted(TINY))
def test_no_example_knows_of_this_project(script: str) -> None:
    text = (EXAMPLES / script).read_text().lower()

    assert not [name for name in OURS if re.search(rf"\b{name}\b", text)]
