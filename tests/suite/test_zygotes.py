"""Processes that tests start are forks of zygotes, and cannot be told from processes that were started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ending import WHOLE_END
from proxied import until
from zygotes import COLD, DIRECTORY, Zygotes

pytestmark = pytest.mark.drawn(9)

# What a script can see of how it came to be. It imports torch, so a zygote is asked.
LOOKS = """
import json, os, resource, signal, sys
import torch
def status(name):
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":"))
numbers = map(int, os.listdir("/proc/self/fd"))
files = sorted(number for number in numbers if os.path.exists(f"/proc/self/fd/{number}"))
print(json.dumps({
    "argv": sys.argv, "executable": sys.executable, "prefix": sys.prefix, "path": sys.path, "name": __name__,
    "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(), "folder": os.getcwd(),
    "variables": dict(os.environ), "line": open("/proc/self/cmdline").read().rstrip("\\0"),
    "shown": sorted(open("/proc/self/environ").read().rstrip("\\0").split("\\0")),
    "mask": os.umask(0), "files": files, "blocked": status("SigBlk"), "ignored": status("SigIgn"),
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE), "leader": os.getsid(0) == os.getpid(),
    "given": sys.stdin.read(), "through": sys.stdout.write_through, "errors": sys.stderr.line_buffering,
    "threads": torch.get_num_threads(), "interrupt": signal.getsignal(signal.SIGINT).__name__,
    "hooks": [type(hook).__name__ for hook in sys.meta_path], "job": os.environ.get("UNDERSTUDY_JOB"),
}))
"""
SURROUNDINGS = 'trap "" USR1; umask 027; ulimit -n 700; exec "$@"'
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COLD, raising=False)


def command(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(script), *arguments]


def is_fork(pid: int) -> bool:
    """Whether a process is a zygote's child."""
    return "zygote.py" in " ".join(psutil.Process(psutil.Process(pid).ppid()).cmdline())


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_fork_sees_what_a_started_process_sees(
    script: Path, tmp_path: Path, unbuffered: bool, warm: None
) -> None:
    script.write_text(LOOKS)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    seen = {}
    for way in ("cold", "forked"):
        ours, theirs = os.pipe()
        variables = os.environ | ONE_THREAD | {"ONE": "two=three", "PYTHONPATH": "/no/such/place"}
        variables |= {COLD: "1"} if way == "cold" else {}
        variables |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
        done = subprocess.run(
            ["bash", "-c", SURROUNDINGS, "-", *command(script, "--x", "a b")],
            env=variables, cwd=folder, pass_fds=[theirs], input="told", capture_output=True, text=True,
            start_new_session=True,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        assert done.returncode == 0, done.stderr
        seen[way] = json.loads(done.stdout)
    cold, forked = seen["cold"], seen["forked"]
    del cold["variables"][COLD]
    cold["shown"].remove(f"{COLD}=1")
    cold["line"] = cold["line"].replace(sys.executable, str(Path(sys.executable).with_name("python")), 1)
    assert forked == cold


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("sys.exit(3)", 3), ("raise ValueError('no')", 1), ("os._exit(7)", 7), ("pass", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("os.abort()", -signal.SIGABRT),
        ("raise KeyboardInterrupt", -signal.SIGINT), ("sys.exit('a sentence')", 1), ("sys.exit(256 + 9)", 9),
        ("def late():\n    time.sleep(0.2)\n    print('late')\nthreading.Thread(target=late).start()", 0),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", 0),
        ("sys.excepthook = lambda *told: print(told[1], flush=True)\nraise ValueError('hooked')", 1),
        ("def fails():\n    raise ValueError\natexit.register(fails)", 0),
        ("ctypes.CDLL(None).printf(b'of C')", 0),
        ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('no room')", 120),
    ],
)  # fmt: skip
def test_a_fork_ends_as_a_started_process_ends(ends: str, status: int, script: Path, warm: None) -> None:
    script.write_text(
        "import atexit, ctypes, os, signal, sys, threading, time\n"
        f"if not os.environ.get({COLD!r}):\n    import torch\n"  # so a zygote is asked
        f"atexit.register(print, 'at exit')\n{ends}\n"
    )
    buffered = os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": ""}
    said = []
    for variables in ({COLD: "1"}, {WHOLE_END: "1"}, {WHOLE_END: ""}):
        done = subprocess.run(command(script), env=buffered | variables, capture_output=True, text=True)
        assert done.returncode == status
        said.append((done.stdout, re.sub(" at 0x[0-9a-f]+", "", done.stderr)))
    started, whole, forked = said
    assert forked == started
    assert (whole[0], _of_the_script(whole[1])) == started


def _of_the_script(errors: str) -> str:
    return re.sub(r'  File "[^"]*/harness/[^\n]*\n(    [^\n]*\n)*', "", errors)


def waiting(script: Path, fifo: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A fork that waits, and its pid."""
    os.mkfifo(fifo)
    script.write_text(
        "import os, signal, sys, time\nimport torch\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        f"print(os.getpid(), file=open({str(fifo)!r}, 'w'), flush=True)\n"
        "while True: time.sleep(0.05)\n"  # before signal.pause() a signal may come that it does not see
    )
    process = subprocess.Popen(command(script), env=os.environ | ONE_THREAD, stderr=subprocess.PIPE)
    pid = int(fifo.read_text())
    assert pid != process.pid and is_fork(pid)
    return process, pid


def test_signals_reach_a_fork_and_its_status_comes_back(script: Path, tmp_path: Path, warm: None) -> None:
    process, _ = waiting(script, tmp_path / "fifo")
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 5


def test_a_fork_is_killed_with_the_process_that_stands_for_it(
    script: Path, tmp_path: Path, warm: None
) -> None:
    process, pid = waiting(script, tmp_path / "fifo")
    process.kill()
    process.communicate(timeout=30)
    until(lambda: not psutil.pid_exists(pid), "the fork has ended")


def test_ranks_that_hang_are_killed_with_the_process_that_stands_for_their_launcher(
    script: Path, tmp_path: Path, warm: None
) -> None:
    """Who reads what they print would wait for ever: Gloo may let ranks hang that PyTorch cannot end."""
    os.mkfifo(tmp_path / "fifo")
    script.write_text(
        "import os, signal, sys\nimport torch\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\nsignal.pause()\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    process = subprocess.Popen(
        [sys.executable, *launch, str(tmp_path / "fifo")],
        env=os.environ | ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    pid = int((tmp_path / "fifo").read_text())
    assert is_fork(pid)
    process.kill()
    process.communicate(timeout=30)
    until(lambda: not psutil.pid_exists(pid), "the rank has ended")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygotes]:
    """Zygotes of this test's own."""
    before, executable = os.environ.get(DIRECTORY), sys.executable
    made = Zygotes()
    yield made
    made.stop()
    sys.executable = executable
    if before is not None:
        os.environ[DIRECTORY] = before


def test_a_zygote_that_dies_is_told_of_and_nothing_hangs(
    script: Path, tmp_path: Path, others: Zygotes, warm: None
) -> None:
    process, pid = waiting(script, tmp_path / "fifo")
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 70 and b"the zygote died that was to run this, or had forked it" in said
    until(lambda: not psutil.pid_exists(pid), "the fork has ended")
    done = subprocess.run(
        command(script), env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and "the zygote 'native' does not answer" in done.stderr


@pytest.mark.parametrize("other", [{"OMP_NUM_THREADS": "2"}, {"LD_BIND_NOW": "1"}, {COLD: "1"}])
def test_what_a_fork_could_not_make_up_for_is_started_anew(
    other: dict[str, str], script: Path, warm: None
) -> None:
    script.write_text("import os\nimport torch\nprint(os.getpid(), torch.get_num_threads())\n")
    process = subprocess.Popen(
        command(script), env=os.environ | ONE_THREAD | other, stdout=subprocess.PIPE, text=True
    )
    said = process.communicate(timeout=60)[0].split()
    assert int(said[0]) == process.pid
    assert said[1] == other.get("OMP_NUM_THREADS", "1")
