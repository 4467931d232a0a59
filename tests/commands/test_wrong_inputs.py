"""What people get wrong in their first hour and at 3 a.m.: each is answered by a sentence and a status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import proxied
import pytest
import test_proxyd_recovery
from proxied import until
from running_node import LONG_S, Node
from running_proxyd import running_proxyd
from training_run import installed

from understudy.recovery import proxyd, proxyrun, recoveryctl
from understudy.recovery.base.errors import ExitStatus
from understudy.recovery.config.proxyrun_options import parse
from understudy.recovery.drills.refusals import FLAG
from understudy.recovery.run.conclusion import NOTHING_PROTECTED

pytestmark = pytest.mark.drawn(4)

variables = test_proxyd_recovery.variables  # the fixture
PROGRAMS: dict[str, Callable[[], int]] = {
    "proxyd": proxyd.main, "proxyrun": proxyrun.main, "recoveryctl": recoveryctl.main,
}  # fmt: skip
USAGE, NOBODY = ExitStatus.USAGE, ExitStatus.NOBODY_ANSWERS


def ends_with(program: str) -> int:
    """Its exit status, in this process."""
    try:
        return PROGRAMS[program]()
    except SystemExit as over:
        return int(over.code or 0)


# ------------------------------------------------------------------ what is wrong on the command line itself
@pytest.mark.parametrize(
    ("line", "status", "sentence"),
    [
        ("proxyd --devcies cpu:2", USAGE, "no such option: --devcies: is --devices meant?"),
        ("proxyd --device cpu:2", USAGE, "no such option: --device: is --devices meant?"),
        ("proxyd", USAGE, "--devices"),
        ("proxyd --devices cpu:two", USAGE, "unknown device spec 'cpu:two': write cpu:COUNT or cuda:COUNT"),
        ("proxyd --devices cpu:1 --validate-every often", USAGE, "a whole number is wanted"),
        ("proxyrun", USAGE, "no command: write for example proxyrun torchrun"),
        ("proxyrun --drll x true", USAGE, "no such option: --drll: is --drill meant?"),
        ("proxyrun --drill kill-servr_rank=1 true", USAGE, "is kill-server meant?"),
        ("proxyrun --job ../night true", USAGE, "--job '../night' is no name: letters, digits, - and _"),
        ("proxyrun --job nächte true", USAGE, "is no name"),
        ("proxyrun --socket {}/typo true", NOBODY, "nobody listens at {}/typo, which --socket names"),
        ("recoveryctl staus", USAGE, "no such command 'staus'"),
        ("recoveryctl drill", USAGE, "no fault is named"),
        ("recoveryctl drill kill-servr", USAGE, "is kill-server meant?"),
        ("recoveryctl drill kill-server --rank one", USAGE, "a whole number is wanted"),
        ("recoveryctl drill kill-server", USAGE, "kill-server needs --rank"),
        ("recoveryctl drill kill-server --rank 0", NOBODY, "start one with proxyd --devices cpu:2"),
        ("recoveryctl status", NOBODY, "start one with proxyd --devices cpu:2"),
        ("recoveryctl status --watch --json", USAGE, "leave out RANK, --json and --wide"),
        ("recoveryctl log dump 0 --socket {}/typo", NOBODY, "no proxyd answers at {}/typo"),
        ("recoveryctl history --since yesterday", USAGE, "yesterday"),
        ("recoveryctl snapshots export {} {}", USAGE, "{} exists: name a directory that does not"),
        (
            "recoveryctl snapshots export {} {}/out --format zip",
            USAGE,
            "is not known: torch, dcp, safetensors",
        ),
        ("recoveryctl snapshots verify {}/typo", USAGE, "{}/typo cannot be read: No such file"),
    ],
)
def test_a_wrong_line_is_answered_in_one_sentence(
    line: str, status: int, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("UNDERSTUDY_SOCKET", raising=False)
    words = [
        word.replace("_", " ") if "servr_" in word else word
        for word in line.replace("{}", str(folder)).split()
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert ends_with(words[0]) == status
    said = capsys.readouterr()
    assert said.out == ""
    (one,) = said.err.splitlines()
    assert one.startswith(f"{words[0]}: ") and sentence.replace("{}", str(folder)) in one, one
    assert sorted(path.name for path in folder.iterdir()) in ([], ["understudy"]), "it made nothing"


def test_a_directory_of_a_socket_is_made_but_not_those_above_it(folder: Path) -> None:
    socket = folder / "absent" / "dir" / "s"
    done = subprocess.run([*installed("proxyd"), "--devices", "cpu:1", "--socket", str(socket)],
                          capture_output=True, text=True, timeout=LONG_S, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (USAGE, "")
    said = f"cannot make the socket directory {socket.parent}: No such file or directory"
    assert done.stderr == f"proxyd: {said}\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("flag", ["-h", "--help", "--version"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_version_are_asked_for_in_the_same_way(
    program: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, flag])
    assert ends_with(program) == ExitStatus.DONE
    shown = capsys.readouterr().out
    assert shown.startswith("torch-understudy ") if flag == "--version" else "Exit status: 0 done" in shown


def test_a_drill_has_the_same_call_by_default_wherever_it_is_ordered() -> None:
    assert str(parse(["--drill", "kill-server rank=1 step=6", "true"]).drills[0]).endswith("call=1")


def test_a_directory_without_a_snapshot_is_not_found_to_be_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["recoveryctl", "snapshots", "list", str(folder), *more])
        assert ends_with("recoveryctl") == ExitStatus.FOUND_BAD
    assert f"no snapshots in {folder}" in capsys.readouterr().out


@pytest.mark.cold
def test_what_is_wrong_with_an_export_is_said_before_pytorch_is_loaded() -> None:
    code = (
        "import sys\n"
        "from understudy.recovery import recoveryctl\n"
        "sys.argv = ['recoveryctl', 'snapshots', 'export', '/', '/']\n"
        "print(recoveryctl.main(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        proxied.python("-P", "-c", code), capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.stdout == "2 False\n", done


# ------------------------------------------------------------------ what nobody would say otherwise
def test_a_run_without_a_proxyd_says_so_and_one_that_uses_no_device_is_told(folder: Path) -> None:
    done = subprocess.run(
        [*installed("proxyrun"), "echo", "hello"], env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
        capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hello\n")
    begins, ends = done.stderr.splitlines()
    assert "started one for this run (cpu:1): `recoveryctl status` finds it" in begins
    assert ends == f"proxyrun: {NOTHING_PROTECTED}"


def test_the_proxyd_of_a_run_is_found_by_the_name_of_its_job(folder: Path) -> None:
    """And its logs are dumped, with what is let go of."""
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "UNDERSTUDY_LOG_LEVEL": "error"}
    code = (
        "import sys, torch\n"
        "x = torch.ones(4, device='cuda')\n"
        "for _ in range(50): x.add_(1)\n"
        "print(x.sum().item(), flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [*installed("proxyrun"), "--job", "found", *proxied.python("-c"), code], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        assert run.stdin is not None and run.stdout is not None
        assert run.stdout.readline() == "204.0\n"

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*installed("recoveryctl"), *words], env=environment, capture_output=True,
                                  text=True, timeout=LONG_S, check=False)  # fmt: skip

        assert "job found: 1 rank" in ask("status").stdout
        assert "job found: 1 rank" in ask("status", "--job", "found").stdout
        dumped = ask("log", "dump", "0", "--records", "0:10000", "--job", "found")
        assert dumped.returncode == 0 and "aten::add_" in dumped.stdout, dumped
        assert re.search(r"^buffer \d+ \(float32 \[4\], made by record \d+ \S+\)$", dumped.stdout, re.M)
        run.stdin.write("\n")
        run.stdin.flush()
        assert run.wait(LONG_S) == 0


def test_a_drill_that_would_end_the_job_is_refused_until_it_is_insisted_on(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """And what a drill fences can be had again by the next job."""
    with Node(tmp_path, variables) as node:
        node.train(steps=60, limit=20)
        node.await_step(20)

        def drill(*words: str) -> subprocess.CompletedProcess[str]:
            command = [*installed("recoveryctl"), "drill", *words, "--socket", str(node.socket)]
            return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)

        for kind in ("device-gone", "lasting-partition", "kill-worker"):
            refused = drill(kind, "--rank", "1")
            assert refused.returncode == ExitStatus.REFUSED, refused
            assert "would end job" in refused.stderr and FLAG in refused.stderr
        assert {device.state for device in node.status().node.devices} == {"leased"}
        struck = subprocess.Popen(
            [*installed("recoveryctl"), "drill", "device-gone", "--rank", "1", FLAG, "--socket",
             str(node.socket)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for rank in (0, 1):
            node.let(60, rank)
        struck.wait(LONG_S)
        until(lambda: not node.status().ranks, "the end of the job")
        until(lambda: {d.state for d in node.status().node.devices} == {"idle"}, "devices that can be had")


# ------------------------------------------------------------------ Ctrl-C
@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_while_a_command_is_loaded_ends_it_without_a_word(program: str) -> None:
    code = (
        "import os, signal, time\n"
        "from understudy.recovery import entry_points\n"
        "def interrupted(name):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "entry_points.import_module = interrupted\n"
        f"entry_points.{program}()\n"
    )
    done = subprocess.run(
        proxied.python("-c", code), capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_proxyd_that_is_interrupted_before_it_is_ready_says_so(folder: Path) -> None:
    started = subprocess.Popen(
        [*installed("proxyd"), "--devices", "cpu:1", "--socket", str(folder / "s")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until((folder / "s").exists, "a socket")  # and PyTorch is being loaded
    started.send_signal(signal.SIGINT)
    said, complaint = started.communicate(timeout=LONG_S)
    if "ready" not in said:
        assert started.returncode == 128 + signal.SIGINT and "before it was ready" in complaint, complaint
    assert "Traceback" not in complaint


def test_the_first_ctrl_c_on_a_proxyd_with_a_job_ends_nobody(
    variables: dict[str, str], tmp_path: Path
) -> None:
    with running_proxyd(tmp_path / "s", 1) as daemon:
        code = (
            "import sys, torch\n"
            "print(torch.ones(4, device='cuda').sum().item(), flush=True); sys.stdin.readline()"
        )
        with subprocess.Popen(
            [*installed("proxyrun"), "--socket", str(daemon.socket), *proxied.python("-c"), code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as run:  # fmt: skip
            assert run.stdin is not None and run.stdout is not None
            assert run.stdout.readline() == "4.0\n"
            daemon.process.send_signal(signal.SIGINT)
            done = subprocess.run([*installed("recoveryctl"), "status", "--socket", str(daemon.socket)],
                                  capture_output=True, text=True, timeout=LONG_S, check=True)  # fmt: skip
            assert "1 rank" in done.stdout
            run.stdin.write("\n")
            run.stdin.flush()
            assert run.wait(LONG_S) == 0
