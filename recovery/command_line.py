"""How our commands speak: one sentence per mistake, exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from understudy.proxy_client import variables
from understudy.recovery.settings import BadInput

BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one sentence."""

    def error(self, message: str) -> NoReturn:
        fail(self.prog, f"{message} (see {self.prog} --help)")


def say(program: str, sentence: str) -> None:
    """A line for the user."""
    print(f"{program}: {sentence}", file=sys.stderr, flush=True)  # noqa: T201


def fail(program: str, sentence: str) -> NoReturn:
    """Say why not, and end."""
    say(program, sentence)
    sys.exit(BAD_INPUT)


def check_variables(program: str, *, warn: bool = True) -> None:
    """Warns of UNDERSTUDY_ variables that mean nothing; raises BadInput for a value that is not possible."""
    for sentence in variables.unknown(os.environ) if warn else ():
        say(program, sentence)
    if sentence := variables.complaint(os.environ):
        raise BadInput(sentence)
