"""A thread that hangs in C with the GIL is made to give it up, and nobody else is (paper 001 §3.2)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.drawn(3)

START = """
import ctypes, os, sys, threading, time
from understudy.jit import _gil
holding = ctypes.PyDLL(None)  # its functions are called with the GIL

def guard(patience):
    while not _gil.freed():
        _gil.beat(patience)
        time.sleep(0.02)
    os.write(1, b"freed thread %d of process %d\\n" % (_gil.freed(), os.getpid()))
    os._exit(75)

def begin(patience):
    _gil.start()
    threading.Thread(target=guard, args=(patience,), daemon=True).start()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", START + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("function", ["sleep(1000)", "pause()"])
def test_the_main_thread_hanging_in_c_with_the_gil_gives_it_up(function: str) -> None:
    done = run(f"begin(0.3)\nos.write(1, b'hangs\\n')\nholding.{function}\nos.write(1, b'came back\\n')")
    assert done.returncode == 75, done.stderr
    freed = re.fullmatch(r"hangs\nfreed thread (\d+) of process (\d+)\n", done.stdout)
    assert freed is not None and freed[1] == freed[2]


def test_any_other_thread_gives_it_up_as_well() -> None:
    done = run("begin(0.3)\nthreading.Thread(target=holding.sleep, args=(1000,)).start()\ntime.sleep(1000)")
    assert done.returncode == 75, done.stderr
    freed = re.fullmatch(r"freed thread (\d+) of process (\d+)\n", done.stdout)
    assert freed is not None and freed[1] != freed[2]


@pytest.mark.parametrize(
    "busy",
    ["holding.usleep(300_000)", "while time.thread_time() < 2.5: pass", "time.sleep(2.5)"],
    ids=["a-short-call-with-it", "a-loop-in-python", "a-call-without-it"],
)
def test_who_only_takes_a_while_keeps_it(busy: str) -> None:
    patience = 20.0 if "usleep" in busy else 1.5
    done = run(f"begin({patience})\n{busy}\nos.write(1, b'came back')\n_gil.stop()\n")
    assert (done.returncode, done.stdout) == (0, "came back"), done.stderr


def test_a_process_that_was_stopped_for_longer_than_patience_lasts_keeps_it() -> None:
    script = START + "begin(1.0)\nprint('begun', flush=True)\nsys.stdin.readline()\n_gil.stop()\n"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(1.5)  # the time that it was stopped is what is tested
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.close()
        assert (process.stdout.read(), process.wait(60)) == ("", 0)


def test_a_forked_child_is_not_watched_and_its_parent_still_is() -> None:
    done = run(
        "begin(0.5)\n"
        "if (child := os.fork()) == 0:\n"
        "    _gil.forget()\n"
        "    holding.sleep(2)\n"
        "    os._exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "holding.pause()\n"
    )
    assert done.returncode == 75, done.stderr
    assert re.fullmatch(r"3\nfreed thread \d+ of process \d+\n", done.stdout)


def test_it_can_be_watched_again_but_not_twice_at_once() -> None:
    done = run(
        "for _ in range(3):\n"
        "    _gil.start(); _gil.beat(1.0)\n"
        "    try: _gil.start()\n"
        "    except RuntimeError as error: print(error)\n"
        "    _gil.stop()\n"
        "_gil.stop(); _gil.beat(1.0)\n"
    )
    assert (done.returncode, done.stdout) == (0, "the GIL is watched already\n" * 3), done.stderr
