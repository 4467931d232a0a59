"""Holds the words of logs as device servers do, says so, and does as it is told by lines of its input.

    life_holder.py [--other-namespace] DIRECTORY ...

`let-go`: lets go of all.  `abandon`: holds the first one by a thread that then ends without letting go.
`leader-ends`: its first thread ends, others go on.  Each is answered by a line.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time

from understudy import replay

SET_ROBUST_LIST = {"x86_64": 273, "aarch64": 99}[os.uname().machine]
CLONE_NEWPID = 0x20000000
WAITERS = 0x80000000
KEPT: list[object] = []
"""What the kernel reads when a thread ends, which is after Python has joined it."""


def abandon(directory: str, word_at: int) -> None:
    """A thread that ends, as a thread that holds a robust mutex would."""
    libc = ctypes.CDLL(None)
    with open(f"{directory}/control", "r+b") as control:
        page = mmap.mmap(control.fileno(), 0)
    word = ctypes.c_uint32.from_buffer(page, word_at)

    class Head(ctypes.Structure):
        _fields_ = (("next", ctypes.c_void_p), ("offset", ctypes.c_long), ("pending", ctypes.c_void_p))

    head, link = Head(), ctypes.c_void_p()
    KEPT.extend((page, word, head, link))

    def hold_and_end() -> None:
        link.value = ctypes.addressof(head)
        head.next = ctypes.addressof(link)
        head.offset = ctypes.addressof(word) - ctypes.addressof(link)
        word.value = threading.get_native_id() | WAITERS
        libc.syscall(SET_ROBUST_LIST, ctypes.byref(head), ctypes.c_size_t(ctypes.sizeof(head)))

    thread = threading.Thread(target=hold_and_end)
    thread.start()
    thread.join()


def main() -> None:
    directories = sys.argv[1:]
    if directories[0] == "--other-namespace":
        directories = directories[1:]
        if ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0:
            sys.exit("no namespace of pids")
        told, tells = os.pipe()
        if child := os.fork():
            print(child, flush=True)
            os.close(tells)
            os.waitpid(child, 0)
            return
        os.close(tells)
        os.read(told, 1)  # until the line above is whole
    held = [replay.HeldLog(directory) for directory in directories]
    print("held", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["let-go"]:
                for one in held:
                    one.let_go()
                print("done", flush=True)
            case ["abandon", at]:
                abandon(directories[0], int(at))
                print("done", flush=True)
            case ["leader-ends"]:
                threading.Thread(target=time.sleep, args=(1000,)).start()
                print("done", flush=True)
                ctypes.CDLL(None).pthread_exit(None)


main()
