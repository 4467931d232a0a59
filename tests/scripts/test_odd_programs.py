"""Programs that nobody thought of see what they see without us, undisturbed and with a server killed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import proxied
import pytest
from native_reference import native_reference

pytestmark = pytest.mark.drawn(30)

ODD = proxied.WORKLOADS / "odd"


@dataclass(frozen=True)
class Program:
    """`kills`: steps in which a server dies, one of them a run.  `calls`: at one of so many."""

    name: str
    kills: tuple[int, ...] = ()
    calls: int = 20
    ranks: int = 2
    options: tuple[str, ...] = ()
    runs: list[str] = field(default_factory=list)


PROGRAMS = [
    Program("settings_set_late", kills=(6, 9, 12)),
    Program("mse_loss", kills=(6,)),
    Program("unwritten_bytes", kills=(4, 8)),
    Program("lstm_across_commits", kills=(5, 12), calls=8),
    Program("waits_in_other_orders", kills=(4, 9), calls=8),
    Program("early_receive_around_a_ring", kills=(6,), calls=8, ranks=3),
    Program("groups_that_meet_late", kills=(4,), calls=8),
    Program("groups_that_meet_late", kills=(3, 9), calls=8, ranks=4),
    Program("forward_mode", kills=(5,), calls=60, ranks=1),
    Program("late_sender"),
    Program("caught_errors", kills=(4, 7), calls=60),
    Program("replaces_itself", kills=(4,), calls=20),
]


def command(program: Program, folder: Path) -> list[str]:
    return proxied.ranks(program.ranks, ODD / f"{program.name}.py", str(folder))


def lines(folder: Path, program: Program) -> list[list[str]]:
    return [(folder / str(rank)).read_text().splitlines() for rank in range(program.ranks)]


def expected(program: Program) -> list[list[str]]:
    return lines(native_reference(lambda folder: command(program, folder)), program)


def check(program: Program, folder: Path, *options: str) -> proxied.Ended:
    ended = proxied.run(command(program, folder), folder=folder, options=(*program.options, *options))
    assert ended.status == 0, ended.output[-3000:]
    assert lines(folder, program) == expected(program), ended.output[-3000:]
    assert "differs" not in ended.output
    assert ended.report["replies_different"] == 0
    return ended


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_updates_its_parameters_itself_is_committed_as_it_goes(
    ranks: int, tmp_path: Path
) -> None:
    """Findings, real programs 7: nothing was, and a fault replayed the whole run."""
    ended = check(
        Program("own_update", ranks=ranks),
        tmp_path,
        "--drill",
        f"kill-server rank={ranks - 1} step=1 call=9500",
    )
    assert ended.report["steps"] == 0 and ended.report["automatic_commits"] >= 2
    (recovery,) = ended.report["recoveries"]
    assert recovery["recovered"]
    if ranks > 1:  # a rank alone has nobody to take the state of a commit from, but a snapshot
        assert "rank 1 at commit 0" not in recovery["reason"]


def test_a_script_catches_that_there_is_no_memory_and_goes_on(tmp_path: Path) -> None:
    """As accelerate's find_executable_batch_size and Lightning's scaler do."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "free, total = torch.cuda.mem_get_info()\n"
        "kept = torch.ones(5, device='cuda')\n"
        "for bytes in (1 << 46, 2 * total, free + (1 << 30)):\n"
        "    for make in (lambda: torch.empty(bytes, dtype=torch.uint8, device='cuda'),\n"
        "                 lambda: kept.expand(bytes // 20, 5).contiguous(),\n"
        "                 lambda: torch.empty(1, device='cuda').untyped_storage().resize_(bytes)):\n"
        "        try:\n"
        "            make()\n"
        "        except torch.OutOfMemoryError as error:\n"
        "            assert str(error).startswith('CUDA out of memory. Tried to allocate '), error\n"
        "            print('CAUGHT')\n"
        "print('SUM', kept.sum().item(), torch.ones(1 << 20, device='cuda').sum().item())\n"
    )
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert ended.output.count("CAUGHT") == 9
    assert "SUM 5.0 1048576.0" in ended.output


@contextlib.contextmanager
def shared_memory_of(mebibytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    place = Path(tempfile.mkdtemp(prefix="understudy-test-"))  # the path of a socket in it must be short
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", place], check=True)
    try:
        monkeypatch.setenv("UNDERSTUDY_SHARED_MEMORY", str(place))
        yield
    finally:
        subprocess.run(["umount", place], check=True)
        place.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
@pytest.mark.parametrize("mebibytes", [64, 200])
def test_a_program_without_an_optimizer_needs_no_more_shared_memory_than_a_container_has(
    mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 800 MB that two ranks send.  Findings, "growth of the log": at 800 MiB it died."""
    script, steps = ODD / "no_optimizer.py", "400"
    native = native_reference(lambda folder: proxied.ranks(2, script, str(folder), steps))
    with shared_memory_of(mebibytes, monkeypatch):
        ended = proxied.run(proxied.ranks(2, script, str(tmp_path), steps), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    assert [(tmp_path / rank).read_text() for rank in "01"] == [(native / rank).read_text() for rank in "01"]
    if mebibytes == 64:
        assert ended.report["steps"] == 0 and ended.report["automatic_commits"] > 0
        assert "no step of a torch.optim optimizer was seen" in ended.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
def test_logs_lie_on_a_disk_where_shared_memory_is_too_small_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_memory_of(1, monkeypatch), tempfile.TemporaryDirectory(prefix="understudy-test-") as disk:
        options = ("--log-dir", disk, "--drill", "kill-server rank=1 step=6 call=9")
        check(Program("mse_loss"), tmp_path, *options)
        assert os.listdir(disk) == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_undisturbed_odd_program_sees_what_it_sees_without_us(program: Program, tmp_path: Path) -> None:
    ended = check(program, tmp_path)
    assert ended.report["recoveries"] == []


@pytest.mark.parametrize(
    ("program", "step"),
    [(program, step) for program in PROGRAMS for step in program.kills],
    ids=lambda given: given.name if isinstance(given, Program) else str(given),
)
def test_an_odd_program_whose_server_is_killed_sees_what_it_sees_without_us(
    program: Program, step: int, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    rank, call = chance.randrange(program.ranks), chance.randint(1, program.calls)
    drill = f"kill-server rank={rank} step={step} call={call}"
    print(drill)
    ended = check(program, tmp_path, "--drill", drill)
    assert len(ended.report["recoveries"]) == 1
