"""Counts and prints, with a thread, a child, a mapped log, an open file: counter.py FOLDER [MiB [FILE]] LOG.

Ends when FOLDER/end exists, with status 7; on SIGUSR1 prints "signal"; on SIGTERM ends with status 5.
"""

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

folder, log = Path(sys.argv[1]), Path(sys.argv[-1])
rank = log.name.partition("-")[2]
large = bytearray(os.urandom(1 << 20)) * int(sys.argv[2]) if len(sys.argv) > 3 else bytearray(b"x")
before = hash(bytes(large))
file = open(log / "marks", "r+b")  # noqa: SIM115 - stays open over moves
marks = mmap.mmap(file.fileno(), 0)
other = open(sys.argv[3], "w") if len(sys.argv) > 4 else None  # noqa: SIM115
if other is not None and folder in Path(other.name).parents:
    fcntl.flock(other, fcntl.LOCK_EX)
notes = open(folder / f"notes.{rank}", "a")  # noqa: SIM115
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert child.stdin and child.stdout
counted = [0]


def count() -> None:
    while not (folder / "end").exists():
        counted[0] += 1
        time.sleep(0.002)


def leave(*_: object) -> None:
    os.write(1, b"leaves\n")
    os._exit(5)


threading.Thread(target=count, daemon=True).start()
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"signal\n"))  # print may be under way
signal.signal(signal.SIGTERM, leave)
step = 0
clock, waited = time.monotonic(), 0.0
while not (folder / "end").exists():
    child.stdin.write(f"{step}\n".encode())
    child.stdin.flush()
    assert child.stdout.readline() == f"{step}\n".encode()
    marks[step * 8 : step * 8 + 8] = step.to_bytes(8, "little")
    notes.write(f"{step}\n")
    notes.flush()
    print(step, flush=True)
    step += 1
    time.sleep(0.002)
    waited, clock = max(waited, abs(time.monotonic() - clock)), time.monotonic()
    assert waited < 60, f"its clock jumped by {waited} s"
assert hash(bytes(large)) == before
assert all(int.from_bytes(marks[at * 8 : at * 8 + 8], "little") == at for at in range(step))
assert (folder / f"notes.{rank}").read_text() == "".join(f"{at}\n" for at in range(step))
print("a" * 300_000, counted[0] > 0, file=sys.stderr, flush=True)
print("done", flush=True)
os._exit(7)
