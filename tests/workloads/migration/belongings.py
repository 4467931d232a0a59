"""A worker with everything that must survive a move: belongings.py FOLDER; goes on when FOLDER/go exists."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

folder = Path(sys.argv[1])
counted = [0]


def count() -> None:
    while not (folder / "go").exists():
        counted[0] += 1
        time.sleep(0.005)


thread = threading.Thread(target=count, name="counter")
thread.start()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert child.stdin and child.stdout
child.stdin.write(b"before ")
child.stdin.flush()
notes = open(folder / "notes", "w+")  # noqa: SIM115 - stays open over the move
notes.write("before ")
notes.flush()
nameless = open(folder / "nameless", "w+b")  # noqa: SIM115
os.unlink(folder / "nameless")
nameless.write(b"kept")
nameless.flush()
large = bytearray(os.urandom(1 << 20)) * 200
pinned = torch.arange(1 << 20).pin_memory()
x = torch.arange(1 << 20, device="cuda")
x.add_(1)
alarms: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, _: alarms.append(number))
before, threads = hash(bytes(large)), threading.active_count()
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
thread.join()
assert hash(bytes(large)) == before
assert torch.equal(pinned, torch.arange(1 << 20))
assert torch.equal(x.cpu(), torch.arange(1 << 20) + 1)
assert torch.equal(pinned.cuda(non_blocking=True).cpu(), pinned)
child.stdin.write(b"after")
child.stdin.close()
assert child.stdout.read() == b"before after"
assert child.wait() == 0
notes.write("after")
notes.close()
assert (folder / "notes").read_text() == "before after"
nameless.seek(0)
assert nameless.read() == b"kept"
os.kill(os.getpid(), signal.SIGUSR1)
assert alarms == [signal.SIGUSR1]
print("all there", counted[0] > 0)
