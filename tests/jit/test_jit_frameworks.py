"""`understudy.jit` in the loops of frameworks: a rank is killed, the job resumes, and it comes to the bits of
one that never stopped. `make test-long` runs those whose framework is not installed beside the tests, too."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import Unavailable, environment
from places import ROOT, TESTS

RANKS = TESTS / "workloads" / "framework_ranks.py"
SCRIPTS = ROOT / "guests" / "scripts"
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
SAMPLE = {
    "trainer": ("transformers", "1:9:backward"),
    "accelerate": ("accelerate", "1:9:backward"),
    "lightning": ("lightning", "1:9:backward"),
}


@dataclass(frozen=True)
class Ended:
    """What a job said."""

    out: str
    errors: str

    @property
    def losses(self) -> dict[int, set[str]]:
        """By step, all that were printed of it: one, unless something went wrong."""
        found: dict[int, set[str]] = {}
        for step, loss in re.findall(r"^step (\d+) loss (\S+)$", self.out, re.MULTILINE):
            found.setdefault(int(step), set()).add(loss)
        return found

    @property
    def ends(self) -> list[str]:
        """Digests of parameters and the optimizer's state, by rank."""
        return [one for _, one in sorted(re.findall(r"rank (\d) ends with ([0-9a-f]{64})", self.out))]

    @property
    def saves(self) -> list[int]:
        """Steps at which a rank saved, in their order; of several ranks one."""
        return sorted({int(one) for one in re.findall(r"rank \d: step (\d+) saved in", self.errors)})

    @property
    def struck(self) -> int:
        """Ranks that failed as they were to."""
        return len(re.findall(r"^struck: ", self.errors, re.MULTILINE))


def assert_same(struck: Ended, undisturbed: Ended) -> None:
    """Each loss that was printed has the bits of the undisturbed run's, and so has what training led to."""
    expected = undisturbed.losses
    assert all(len(losses) == 1 for losses in expected.values())
    assert all(losses == expected[step] for step, losses in struck.losses.items())
    assert len(struck.losses) >= len(expected) - struck.struck, (
        "of a step that rank 0 died behind, nobody tells"
    )
    assert len(undisturbed.ends) == 2 and struck.ends == undisturbed.ends


def text_of_letters(path: Path) -> Path:
    """Something to learn, the same everywhere."""
    digests = (hashlib.sha256(str(number).encode()).hexdigest() for number in range(200))
    path.write_text(" ".join(digests))
    return path


@pytest.fixture
def sample(tmp_path: Path, name: str) -> Path:
    """Where the short runs of a framework lie, if it is installed beside the tests."""
    package, strikes = SAMPLE[name]
    wanted = [f"{name}={strikes}"] if importlib.util.find_spec(package) is not None else []
    text = text_of_letters(tmp_path / "text")
    command = [sys.executable, str(RANKS), str(text), str(tmp_path), *wanted]
    variables = ENVIRONMENT | {"EPOCHS": "1"}
    done = subprocess.run(command, env=variables, timeout=200, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    for errors in sorted(tmp_path.glob("*.errors")):
        print(errors.name, errors.read_text()[-6000:], sep="\n")
    assert done.returncode == 0
    return tmp_path


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_job_of_a_framework_whose_rank_was_killed_comes_to_the_bits_of_one_that_never_stopped(
    sample: Path, name: str
) -> None:
    if importlib.util.find_spec(SAMPLE[name][0]) is None:
        pytest.skip(f"needs {SAMPLE[name][0]}")
    undisturbed, struck = (
        Ended((sample / f"{name}.{kind}").read_text(), (sample / f"{name}.{kind}.errors").read_text())
        for kind in ("undisturbed", "struck")
    )
    assert (undisturbed.saves, struck.saves, struck.struck) == ([], [4], 1)
    assert_same(struck, undisturbed)
    assert len(struck.losses) == len(undisturbed.losses), "rank 0, which tells, lived"


@dataclass(frozen=True)
class Program:
    """A script `guests/scripts/jit_….py`, its arguments, and what befalls its ranks (`struck.py`).

    `environment`: of guests/environments; empty: that of the tests. `saves`: the steps behind which a save
    was made. `fails`: what it says where it cannot start.
    """

    name: str
    script: str
    strikes: str = ""
    saves: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: str = ""
    fails: str = ""

    def __str__(self) -> str:
        return self.name


PROGRAMS = (
    # First batch of an epoch; behind a step with an evaluation; amid accumulation. Then: in an evaluation;
    # all ranks behind a checkpoint of the Trainer's own.
    Program("trainer", "jit_trainer.py", "1:17:forward,0:8:updated,1:3:backward", (8, 12, 13)),
    Program("trainer-own-checkpoint", "jit_trainer.py", "0:6:evaluation,*:7:forward,0:9:backward", (3, 9)),
    Program(
        "accelerate", "jit_accelerate.py", "1:9:backward,0:9:forward,1:6:updated,1:1:forward", (4, 8, 11)
    ),
    # Behind a validation amid the epoch; the epoch's last step; in a validation; the last step of all.
    Program(
        "lightning",
        "jit_lightning.py",
        "1:9:backward,0:8:updated,1:8:evaluation,0:8:updated",
        (4, 8, 12, 16),
    ),
    Program(
        "deepspeed",
        "jit_deepspeed.py",
        "1:9:backward,0:8:updated,1:3:forward",
        (4, 8, 9),
        environment="deepspeed",
    ),
    # No replica: what exceptions leave is whole, and what a kill leaves is passed over.
    Program(
        "deepspeed-zero-1",
        "jit_deepspeed.py",
        "1:9:forward:raise,0:7:backward:raise,1:10:backward",
        (4, 7, 11),
        ("1",),
        environment="deepspeed",
    ),
    Program(
        "deepspeed-zero-2",
        "jit_deepspeed.py",
        "0:17:forward:raise",
        (8,),
        ("2",),
        environment="deepspeed",
    ),
    Program(
        "megatron", "jit_megatron.py", environment="megatron", fails="Torch not compiled with CUDA enabled"
    ),
)


@pytest.mark.long
@pytest.mark.timeout(900)  # environments are made from the package registry
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_under_torchrun_resumes_wherever_its_ranks_fail(tmp_path: Path, program: Program) -> None:
    try:
        folder = environment(program.environment) if program.environment else Path(sys.prefix)
    except Unavailable as problem:
        pytest.skip(f"its environment cannot be made: {problem}")
    text = text_of_letters(tmp_path / "text")
    if program.fails:
        (tmp_path / "alone").mkdir()
        command = launch(folder, program, text, tmp_path / "alone", "")
        assert command.returncode != 0 and program.fails in command.stderr
        return
    ended = []
    for name, strikes in (("undisturbed", ""), ("struck", program.strikes)):
        (tmp_path / name).mkdir()
        done = launch(folder, program, text, tmp_path / name, strikes)
        print(done.stdout, done.stderr)
        assert done.returncode == 0
        ended.append(Ended(done.stdout, done.stderr))
    undisturbed, struck = ended
    assert (undisturbed.saves, tuple(struck.saves)) == ([], program.saves)
    assert struck.struck == program.strikes.count(",") + 1 + program.strikes.count("*")
    assert_same(struck, undisturbed)


@pytest.mark.long
def test_what_a_framework_cannot_have_is_told_in_a_sentence(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(package) is None for package, _ in SAMPLE.values()):
        pytest.skip("needs transformers, accelerate and lightning")
    command = [sys.executable, str(TESTS / "workloads" / "framework_mistakes.py"), str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=200, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert "resume_from_checkpoint=callback.checkpoint(trainer)" in said["trainer without checkpoint()"]
    assert "shards its state (is_fsdp_enabled)" in said["trainer in shards"]
    assert "ckpt_path=callback.checkpoint(trainer)" in said["lightning without checkpoint()"]
    assert "start all with torchrun" in said["lightning starts ranks"]
    assert "DistributedType.FSDP, whose state is sharded" in said["accelerate in shards"]


def launch(
    folder: Path, program: Program, text: Path, out: Path, strikes: str
) -> subprocess.CompletedProcess[str]:
    """By `torchrun --max-restarts`."""
    command: Sequence[str | Path] = [
        folder / "bin" / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        f"--max-restarts={program.strikes.count(',') + 2 if program.strikes else 0}",
        SCRIPTS / program.script, text, out, *program.arguments,
    ]  # fmt: skip
    variables = ENVIRONMENT | {"STRIKES": strikes, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    return subprocess.run(
        list(map(str, command)),
        env=variables,
        cwd=out,
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )
