"""`make tour`: types the commands of README's "Use it", one after the other, and shows what they say.

It happens in a directory, with sockets and a history, of its own, which go with it.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from terminal import Terminal, block_below
from training_run import BIN, ROOT

AGAIN_S = 60.0
"""A command that is refused is typed again for so long: the training may not be there yet."""
PAUSE_S = 0.5
OURS = ("UNDERSTUDY_SOCKET", "UNDERSTUDY_HISTORY", "STATE_DIRECTORY")
"""What says where a proxyd, and its history, of this person are."""
TRAINS = re.compile(r"^step ", re.MULTILINE)


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="understudy-tour-", dir="/tmp") as folder:
        commands = block_below((ROOT / "README.md").read_text(), "## Use it")
        ours = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "COLUMNS": str(shutil.get_terminal_size((100, 30)).columns),  # what they say goes by a file
        }
        try:
            return play(commands, Path(folder), os.environ | ours)
        except KeyboardInterrupt:
            return 130


def play(commands: list[str], folder: Path, environment: Mapping[str, str]) -> int:
    """0 if each of them has succeeded."""
    terminal = terminal_in(folder, environment)
    try:
        status = next((status for line in commands if (status := _typed(terminal, line))), 0)
    finally:
        _say("\nThe tour is over, and ends what still runs.\n")
        terminal.close()
    return status


def _typed(terminal: Terminal, line: str) -> int:
    """Its exit status; a training in the background is watched until its first steps."""

    def show() -> str:
        return "".join(_say(job.take()) for job in terminal.background)

    _say(f"\n$ {line}\n")
    began = time.monotonic()
    while True:
        ran = terminal.run(line, meanwhile=show)
        _say(ran.output if ran.status == 0 else "")
        if terminal.background and terminal.background[-1].line == line:
            while not TRAINS.search(show()):
                if time.monotonic() - began > AGAIN_S:
                    _say("tour: it does not train\n")
                    return 1
                time.sleep(PAUSE_S)
        if line.startswith("kill "):
            terminal.background.clear()  # what they still have to say is of no interest
        if ran.status == 0:
            return 0
        if time.monotonic() - began > AGAIN_S:
            _say(f"{ran.output}tour: it ended with status {ran.status}\n")
            return 1
        show()
        time.sleep(PAUSE_S)


def terminal_in(folder: Path, environment: Mapping[str, str]) -> Terminal:
    """Of a person who stands in a checkout's root, and has used nothing of ours yet."""
    place = folder / "here"
    place.mkdir()
    (place / "examples").symlink_to(ROOT / "examples")
    return Terminal(place, _surroundings(folder, environment))


def _surroundings(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    own = folder / "own"
    own.mkdir(mode=0o700)
    theirs = {name: value for name, value in environment.items() if name not in OURS}
    return theirs | {
        "XDG_RUNTIME_DIR": str(own),
        "XDG_STATE_HOME": str(own),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
    }


def _say(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


if __name__ == "__main__":
    sys.exit(main())
