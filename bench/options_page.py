"""docs/options.md: every option of proxyd, proxyrun and recoveryctl, from what `--help` is made of.

    make options-page

tests/static/test_options_page.py compares the page with the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from man_pages import OF_ALL, Page, Parameter, pages

from understudy.proxy_client.variables import VARIABLES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
HEAD = """# Options

Written by `make options-page` from the commands themselves: do not edit it.

An option of `proxyd` can be written in three ways, and whichever stands first here counts:

1. on the command line: `proxyd --persist-every 60`;
2. in a variable: `UNDERSTUDY_PROXYD_PERSIST_EVERY=60`;
3. in a file of YAML, which `--config FILE` names (or `UNDERSTUDY_PROXYD_CONFIG`), a line for each option:
   `persist-every: 60`. An option without a value is `true` or `false` there.

A name that is not known is refused in a file, and told of in a variable. A proxyd that `proxyrun` starts for
one run has the options of that `proxyrun`, and no others.
"""
BAR = "\\|"
"""Else it would end the column."""
_SHOWN = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "*": "\\*"})


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for one in pages() for line in _of(one)), *_variables()]) + "\n"


def _of(command: Page) -> Iterator[str]:
    options = {
        panel: found for panel, found in command.options.items() if panel != OF_ALL or command.path[1:]
    }
    if not options and not command.arguments:
        return
    yield f"{'#' * (len(command.path) + 1)} `{' '.join(command.path)}`\n"
    if command.paragraphs:
        yield f"{command.paragraphs[0].translate(_SHOWN)}\n"
    yield from _table("argument", command.arguments)
    for panel, found in options.items():
        yield from _table("option" if panel == OF_ALL else panel, found)


def _table(title: str, parameters: Iterable[Parameter]) -> Iterator[str]:
    rows = [
        f"| `{one.usage.replace('|', BAR)}` | {one.help.translate(_SHOWN)} |"
        for one in parameters
        if "--help" not in one.usage
    ]
    if rows:
        yield from (f"| {title} | what it does |", "|---|---|", *rows, "")


def _variables() -> Iterator[str]:
    yield from ("## Environment variables\n", "What each is for: [overview](design/overview.md).\n")
    yield from ("| variable | must be |", "|---|---|")
    for one in VARIABLES:
        if not one.name.startswith("UNDERSTUDY_TEST_"):
            yield f"| `{one.name}` | {one.must_be} |"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page())
