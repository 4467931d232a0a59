"""Runs a script, and leaves without the end of the interpreter.

    leaves_at_once.py SCRIPT ARGUMENT…

PyTorch 2.13 aborts now and then when an interpreter ends that has used Gloo ("terminate called without an
active exception", in a native thread that wants the GIL; 3 of 160 runs under torchrun). Where that is not
what is tested, it is not waited for. What the script raises ends this process as ever.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """With status 0, and all that was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()
