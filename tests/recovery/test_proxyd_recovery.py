"""proxyd, real device servers and two ranks that append their records: faults on the way to known values.

The ranks are this file, run as a script; they use the log's own writer instead of PyTorch and the client.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from understudy.recovery.base.errors import ExitStatus
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("understudy.proxy_server._server") is None,
        reason="the device server is not installed",
    ),
    pytest.mark.drawn(12),
]

FLOATS = 4096
FLOAT, TENSOR, DOUBLE, CONSTANT = 6, 1, 7, 17
OPERATOR, ALLOCATE, READ, PHASE, COMMIT, CREATE, COLLECTIVE, END = 1, 4, 7, 12, 13, 15, 17, 19
PARAMETER, GRADIENT, PRIVATE, COMMUNICATOR = 1, 2, 3, 900
OLD_KERNEL = str(Path(__file__).parents[2] / "bench" / "old_kernel.py")


# ------------------------------------------------------------------ a rank
def bits(value: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def tensor_words() -> list[int]:
    return [TENSOR | FLOAT << 8 | 1 << 16, 0, FLOATS, 1]


def work(rank: int, world: int, steps: int) -> None:
    """Parameter += sum over ranks of (rank + 1) * step; Private += Parameter; prints both after each step."""
    import torch_version  # type: ignore[import-not-found]

    from understudy import replay
    from understudy.recovery.base.control import blocking_channel, pb, rpc

    with blocking_channel(os.environ["UNDERSTUDY_SOCKET"]) as channel:
        session = rpc.DaemonStub(channel).OpenSession(
            pb.OpenSessionRequest(
                job=os.environ["UNDERSTUDY_JOB"], rank=rank, world=world, device_index=rank,
                worker_pid=os.getpid(), torch_version=torch_version.VERSION, threads=1,
            ),
            timeout=60,
        )  # fmt: skip
    if session.error:
        sys.exit(session.error)
    log = replay.LogWriter(session.log_directory)
    seen = replay.Log(session.log_directory)

    def report_fault(index: int) -> None:
        """Claim what a device server would if a collective failed on it; until the recovery has come."""
        with blocking_channel(os.environ["UNDERSTUDY_SOCKET"]) as channel:
            daemon = rpc.DaemonStub(channel)

            def generation() -> int:
                (here,) = (r for r in daemon.GetStatus(pb.StatusRequest()).ranks if r.rank == rank)
                return int(here.generation) if here.state == "running" else -1

            while (now := generation()) < 0:
                time.sleep(0.002)  # waits for a remote state, which has no event here
            daemon.ReportFault(
                pb.FaultReport(
                    job=os.environ["UNDERSTUDY_JOB"], rank=rank, generation=now, message="link down",
                    record_index=index,
                )
            )  # fmt: skip
            while seen.session_state == 0 and generation() <= now:
                time.sleep(0.002)

    fill = log.put_template("aten::fill_.Scalar", [*tensor_words(), DOUBLE], [0])
    add = log.put_template("aten::add_.Tensor", [*tensor_words(), *tensor_words(), CONSTANT, bits(1.0)], [0])

    def read(handle: int) -> float:
        return float(struct.unpack("<f", log.call(READ, handle, [0, 4]))[0])

    def await_limit(step: int) -> None:
        """Until the file that the test writes lets this rank begin a step; step 0 is the first record."""
        while "LIMIT_FILE" in os.environ and step > int(
            Path(f"{os.environ['LIMIT_FILE']}.{rank}").read_text()
        ):
            time.sleep(0.005)  # waits for a file, which has no event here

    await_limit(0)
    for handle, value in ((PARAMETER, 1.0), (GRADIENT, 0.0), (PRIVATE, float(rank))):
        log.append(ALLOCATE, handle, [FLOATS * 4])
        log.append(OPERATOR, fill, [handle, bits(value)])
    log.append(CREATE, COMMUNICATOR, [7, 9, rank, world, 60_000])
    for step in range(1, steps + 1):
        await_limit(step)
        log.append(OPERATOR, fill, [GRADIENT, bits((rank + 1.0) * step)])
        header = [1, 0, 0, 0, step, 0, 1, 0]
        raw = [TENSOR | FLOAT << 8 | 1 << 16, GRADIENT, *tensor_words()[1:]]
        log.append(COLLECTIVE, COMMUNICATOR, header + raw)
        log.append(PHASE, 1, [])
        log.append(OPERATOR, add, [PARAMETER, GRADIENT])
        log.append(PHASE, 0, [])
        log.append(COMMIT, 0, [])
        log.append(OPERATOR, add, [PRIVATE, PARAMETER])
        if step % 3 == 0 or step == steps:
            print(step, read(PARAMETER), read(PRIVATE), flush=True)
        if "AWAIT_FLOOR" in os.environ:
            read(PARAMETER)
            while seen.floor_commit < step:
                assert seen.session_state == 0
                time.sleep(0.002)  # waits for shared memory, which has no event here
        if os.environ.get("SCRIBBLE_AT") == str(step):
            read(PARAMETER)
            seen.server_life = int(os.environ["SCRIBBLED"])
        if rank == 0 and os.environ.get("REPORT_FAULT_AT") == str(step):
            read(PARAMETER)
            index = seen.cursor_index
            for _ in range(int(os.environ["REPORT_TIMES"])):
                report_fault(index)
        if os.environ.get("PAUSE_AT") == str(step):
            Path(os.environ["PAUSE_FILE"] + f".{rank}").touch()
            while Path(os.environ["PAUSE_FILE"]).exists():
                time.sleep(0.01)
    log.call(END, 0, [])


def rounded(value: float) -> float:
    """As a 32-bit float holds it."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def expected(rank: int, world: int, steps: int) -> list[str]:
    parameter, private, lines = 1.0, float(rank), []
    for step in range(1, steps + 1):
        parameter = rounded(parameter + sum((other + 1) * step for other in range(world)))
        private = rounded(private + parameter)
        if step % 3 == 0 or step == steps:
            lines.append(f"{step} {parameter} {private}")
    return lines


# ------------------------------------------------------------------ a run
def understudy_processes(marker: str) -> list[int]:
    """Processes whose environment holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@contextmanager
def nothing_left(directory: Path, variables: dict[str, str]) -> Iterator[None]:
    before = set(SHARED_MEMORY.glob(f"understudy-{os.getuid()}-*"))
    yield
    assert understudy_processes(variables["TEST_MARKER"]) == []
    left = set(SHARED_MEMORY.glob(f"understudy-{os.getuid()}-*")) - before
    assert not [path for path in left if not _alive(path)]


def _alive(path: Path) -> bool:
    return Path(f"/proc/{path.name.split('-')[2]}").exists()


@pytest.fixture
def variables(tmp_path: Path) -> Iterator[dict[str, str]]:
    import importlib.metadata

    (tmp_path / "torch_version.py").write_text(f"VERSION = {importlib.metadata.version('torch')!r}\n")
    marker = f"UNDERSTUDY_TEST_{tmp_path.name}_{os.getpid()}_{time.monotonic_ns()}"
    old = os.environ.get("PYTHONPATH", "")
    given = os.environ | {
        "TEST_MARKER": marker,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{old}".rstrip(os.pathsep),
    }
    given.pop("UNDERSTUDY_SOCKET", None)
    given["XDG_RUNTIME_DIR"] = str(tmp_path)
    with nothing_left(tmp_path, given):
        yield given


# As torchrun does: when one rank fails, the others are ended.
LAUNCH = """
import os, signal, subprocess, sys, tempfile
world, steps = sys.argv[2:4]
outputs = [tempfile.TemporaryFile("w+") for _ in range(int(world))]
ranks = [subprocess.Popen([sys.executable, sys.argv[1], "worker", str(rank), world, steps], stdout=output)
         for rank, output in enumerate(outputs)]
status = 0
for _ in ranks:
    pid, code = os.wait()
    status = status or abs(os.waitstatus_to_exitcode(code))
    if status:
        for rank in ranks:
            if rank.pid != pid and os.path.exists(f"/proc/{rank.pid}"):
                os.kill(rank.pid, signal.SIGTERM)
for output in outputs:
    output.seek(0)
sys.stdout.write("\\0".join(output.read() for output in outputs))
sys.exit(status)
"""


def proxyrun(
    variables: dict[str, str],
    directory: Path,
    *flags: str,
    world: int = 2,
    steps: int = 12,
    through: tuple[str, ...] = (),
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    report = directory / "report.json"
    command = [
        *through, *module_command("recovery.proxyrun"), *flags, "--report", str(report),
        sys.executable, "-c", LAUNCH, __file__, str(world), str(steps),
    ]  # fmt: skip
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    print(done.stderr)
    return done, json.loads(report.read_text()) if report.exists() else {}


def test_ranks_without_a_fault_compute_what_they_should(variables: dict[str, str], tmp_path: Path) -> None:
    done, report = proxyrun(variables, tmp_path, "--devices", "cpu:2")
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert report["steps"] == 12
    assert report["recoveries"] == []


@pytest.mark.drawn(21)
@pytest.mark.parametrize("steps", [(1, 7), (2,)], ids=str)
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6, 7])
def test_server_killed_before_any_record_of_a_minibatch_changes_no_value(
    steps: tuple[int, ...], call: int, variables: dict[str, str], tmp_path: Path
) -> None:
    drills = [word for step in steps for word in ("--drill", f"kill-server rank=1 step={step} call={call}")]
    done, report = proxyrun(variables, tmp_path, "--devices", "cpu:2", *drills)
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert [fault["fired"] for fault in report["faults"]] == [True] * len(steps)
    assert [(r["rank"], r["step"], r["plan"], r["recovered"]) for r in report["recoveries"]] == [
        (1, step, "restart-copy-replay", True) for step in steps
    ]
    assert report["replies_different"] == 0


@pytest.mark.cold  # a fork would not be under the filter
def test_server_killed_on_a_kernel_without_futex_waitv_changes_no_value(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """Its pidfd tells of the death."""
    drill = ("--drill", "kill-server rank=1 step=5 call=3")
    given = variables | {"UNDERSTUDY_LOG_LEVEL": "warning"}
    through = (sys.executable, OLD_KERNEL)
    done, report = proxyrun(given, tmp_path, "--devices", "cpu:2", *drill, through=through)
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert [(r["rank"], r["plan"], r["recovered"]) for r in report["recoveries"]] == [
        (1, "restart-copy-replay", True)
    ]
    assert done.stderr.count("pidfd alone") == 1


@pytest.mark.parametrize(
    ("word", "killed"), [(0xC0000000, False), (0xC0000000, True), (0x12345678, True), (0, True)]
)
def test_worker_that_writes_into_the_word_of_its_server_makes_no_death_and_hides_none(
    word: int, killed: bool, variables: dict[str, str], tmp_path: Path
) -> None:
    given = variables | {"SCRIBBLE_AT": "3", "SCRIBBLED": str(word)}
    drill = ("--drill", "kill-server rank=1 step=5 call=3") if killed else ()
    done, report = proxyrun(given, tmp_path, "--devices", "cpu:2", *drill)
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert [r["rank"] for r in report["recoveries"]] == [1] * killed


def test_three_ranks_survive_the_death_of_any_of_them(variables: dict[str, str], tmp_path: Path) -> None:
    """One waits for a peer that lives: it must be got out of that wait, too."""
    calls = range(1, 8)
    drills = [
        word
        for call in calls
        for word in ("--drill", f"kill-server rank={call % 3} step={3 * call} call={call}")
    ]
    done, report = proxyrun(variables, tmp_path, "--devices", "cpu:3", *drills, world=3, steps=24)
    assert done.returncode == 0
    values = [part.split("\n")[:-1] for part in done.stdout.split("\0")]
    assert values == [expected(rank, 3, 24) for rank in range(3)]
    recoveries = report["recoveries"]
    assert [(r["rank"], r["plan"]) for r in recoveries] == [(c % 3, "restart-copy-replay") for c in calls]
    assert max(r["total_s"] - r["replay_s"] for r in recoveries) < 10, "somebody was not woken from a wait"


def test_server_killed_in_three_minibatches_on_both_ranks_changes_no_value(
    variables: dict[str, str], tmp_path: Path
) -> None:
    drills = [
        "kill-server rank=1 step=3 call=2",
        "kill-server rank=0 step=5 call=3",
        "kill-server rank=1 step=9 call=1",
    ]
    flags = [word for drill in drills for word in ("--drill", drill)]
    done, report = proxyrun(variables, tmp_path, "--devices", "cpu:2", *flags)
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert sorted(r["rank"] for r in report["recoveries"] if r["recovered"]) == [0, 1, 1]


def test_server_killed_twice_at_the_same_record_changes_no_value(
    variables: dict[str, str], tmp_path: Path
) -> None:
    flags = ["--drill", "kill-server rank=1 step=5 call=3"] * 4
    done, report = proxyrun(variables, tmp_path, "--devices", "cpu:2", *flags)
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert all(fault["fired"] for fault in report["faults"])


def test_replicated_state_comes_from_the_replica_and_is_not_shadowed(
    variables: dict[str, str], tmp_path: Path
) -> None:
    drill = "kill-server rank=1 step=9 call=4"
    waiting = variables | {"AWAIT_FLOOR": "1"}
    done, report = proxyrun(waiting, tmp_path, "--devices", "cpu:2", "--drill", drill)
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert report["recoveries"][0]["copied_bytes"] >= FLOATS * 4


def test_every_replica_killed_at_once_comes_back_from_snapshots_or_the_whole_log(
    variables: dict[str, str], tmp_path: Path
) -> None:
    drills = [word for rank in (0, 1) for word in ("--drill", f"kill-server rank={rank} step=9 call=2")]
    for attempt in range(5):  # on a slow machine one may be back before the other comes there
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done, report = proxyrun(
            variables | {"AWAIT_FLOOR": "1"}, folder, "--devices", "cpu:2", "--spares", "2", *drills
        )
        assert done.returncode == 0
        shown = [part.split("\n")[:-1] for part in done.stdout.split("\0")]
        assert shown == [expected(r, 2, 12) for r in (0, 1)]
        if len(report["recoveries"]) == 1 or report["recoveries"][-1]["plan"] != "restart-copy-replay":
            break
    assert report["recoveries"][-1]["plan"] == "restore-snapshot-replay"
    assert (
        "every replica died: the device servers of ranks 0, 1 are gone" in report["recoveries"][-1]["reason"]
    )


def test_collective_that_fails_once_is_rewound_in_place(variables: dict[str, str], tmp_path: Path) -> None:
    faulty = variables | {"REPORT_FAULT_AT": "5", "REPORT_TIMES": "1"}
    done, report = proxyrun(faulty, tmp_path, "--devices", "cpu:2")
    assert done.returncode == 0
    assert [part.split("\n")[:-1] for part in done.stdout.split("\0")] == [expected(r, 2, 12) for r in (0, 1)]
    assert [(r["fault"], r["plan"]) for r in report["recoveries"]] == [
        ("collective-failed", "rewind-in-place")
    ]
    assert report["replies_different"] == 0


def test_record_that_fails_three_times_raises_its_own_error_in_the_worker(
    variables: dict[str, str], tmp_path: Path
) -> None:
    faulty = variables | {"REPORT_FAULT_AT": "5", "REPORT_TIMES": "3"}
    done, report = proxyrun(faulty, tmp_path, "--devices", "cpu:2")
    assert done.returncode != 0
    assert [r["plan"] for r in report["recoveries"]] == ["rewind-in-place", "rewind-in-place", "give-up"]
    assert "RemoteError" in done.stderr
    assert "link down" in done.stderr


def test_drill_that_never_fires_is_named_and_an_error(variables: dict[str, str], tmp_path: Path) -> None:
    done, report = proxyrun(
        variables, tmp_path, "--drill", "kill-server rank=1 step=99 call=1", "--devices", "cpu:2"
    )
    assert done.returncode == ExitStatus.REFUSED
    assert "'kill-server rank=1 step=99 call=1' never fired" in done.stderr
    assert report["faults"] == [{"kind": "kill-server", "rank": 1, "step": 99, "call": 1, "fired": False}]


def test_more_ranks_than_devices_is_one_sentence(variables: dict[str, str], tmp_path: Path) -> None:
    done, _ = proxyrun(
        variables, tmp_path, "--devices", "cpu:1", "--drill", "kill-server rank=0 step=1 call=1"
    )
    assert done.returncode != 0
    assert (
        "more ranks than devices: rank 1 asked for cuda:1 but proxyd serves 1 device (cpu:0)" in done.stderr
    )


def test_worker_killed_in_mid_run_leaves_nothing_behind(variables: dict[str, str], tmp_path: Path) -> None:
    pause = tmp_path / "pause"
    pause.touch()
    paused = variables | {"PAUSE_AT": "4", "PAUSE_FILE": str(pause)}
    command = [
        *module_command("recovery.proxyrun"),
        "--devices",
        "cpu:2",
        sys.executable,
        "-c",
        LAUNCH,
    ]
    run = subprocess.Popen([*command, __file__, "2", "12"], env=paused, stdout=subprocess.PIPE, text=True)
    while not all((tmp_path / f"pause.{rank}").exists() for rank in (0, 1)):
        assert run.poll() is None
        time.sleep(0.01)  # waits for a file, which has no event here
    workers = [
        pid
        for pid in understudy_processes(variables["TEST_MARKER"])
        if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    pause.unlink()
    run.communicate(timeout=60)
    assert run.returncode != 0


if __name__ == "__main__" and sys.argv[1] == "worker":
    work(*map(int, sys.argv[2:5]))
