"""Starts nvidia-resiliency-ext's launcher: `python launch_nvrx.py WORD...`, with a folder for its sockets.

They lie in TMPDIR, and the kernel takes 107 bytes of a socket's path, which a campaign's folders may exceed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

SHORT = "UNDERSTUDY_SHARED_MEMORY"
"""Of the run, with a short path; its runner removes it, whatever becomes of us."""


def main(words: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(
        prefix="nvrx-", dir=os.environ.get(SHORT), ignore_cleanup_errors=True
    ) as folder:
        return subprocess.run(words, env=os.environ | {"TMPDIR": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
