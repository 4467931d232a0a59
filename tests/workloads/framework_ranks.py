"""Starts the ranks of scripts that need much to be imported, as torchrun does, but as forks of this process.

    framework_ranks.py TEXT OUT NAME=STRIKES …

Each NAME is a script `guests/scripts/jit_NAME.py`. It is run once undisturbed, and once with a rank killed,
which starts all ranks anew (STRIKES: guests/scripts/struck.py). What the ranks print lies in
`OUT/NAME.undisturbed` and `OUT/NAME.struck`, what they say to stderr beside it, in files `….errors`.
Frameworks that are not here are left out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1] / "harness" / "processes"))

from start_ranks import free_port

SCRIPTS = Path(__file__).parents[2] / "guests" / "scripts"
NEEDS = {"trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning"}
RANKS = 2
MOST_ATTEMPTS = 4


def main() -> None:
    text, out = sys.argv[1], Path(sys.argv[2])
    wanted = dict(one.split("=") for one in sys.argv[3:])
    for name in wanted:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"understudy.jit.glue.{name}")
    with contextlib.suppress(ImportError):  # what the scripts' model and their Trainers import late
        import transformers

        _ = transformers.LlamaForCausalLM, transformers.Trainer
    gc.freeze()  # ranks collect garbage, and what they touch of this they copy
    for name, strikes in wanted.items():
        if f"understudy.jit.glue.{name}" in sys.modules:
            run(name, text, out / f"{name}.undisturbed", "")
            run(name, text, out / f"{name}.struck", strikes)


def run(name: str, text: str, said: Path, strikes: str) -> None:
    """Attempts, until all ranks end well."""
    folder = said.with_suffix(said.suffix + ".files")
    folder.mkdir()
    for attempt in range(MOST_ATTEMPTS):
        place = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "frameworks",
            "TORCHELASTIC_RESTART_COUNT": str(attempt), "STRIKES": strikes,
        }  # fmt: skip
        ranks = {}
        for rank in range(RANKS):
            if (process := os.fork()) == 0:
                os.environ.update(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                be_rank(name, text, folder, said)
            ranks[process] = rank
        if all_end_well(ranks):
            return
    raise SystemExit(f"{name} has not come to its end in {MOST_ATTEMPTS} attempts")


def be_rank(name: str, text: str, folder: Path, said: Path) -> NoReturn:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(said, flags, 0o600), 1)
    os.dup2(os.open(said.with_suffix(said.suffix + ".errors"), flags, 0o600), 2)
    sys.path.insert(0, str(SCRIPTS))
    sys.argv = [f"jit_{name}.py", text, str(folder)]
    try:
        runpy.run_path(str(SCRIPTS / sys.argv[0]), run_name="__main__")
    except Exception as error:  # noqa: BLE001 - as the end of an interpreter
        sys.excepthook(type(error), error, error.__traceback__)
        traceback.print_exc()
    os._exit(1)  # a script ends by itself


def all_end_well(ranks: dict[int, int]) -> bool:
    """As soon as one has failed, the others are told to end."""
    failed = False
    while ranks:
        process, status = os.wait()
        del ranks[process]
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return not failed


if __name__ == "__main__":
    main()
