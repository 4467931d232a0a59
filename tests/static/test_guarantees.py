"""docs/guarantees.md promises nothing without a test, and names no test and no option that there is not."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "guarantees.md"
PROMISED, NOT_YET = "## What is guaranteed", "## What is not, yet"
CODE = re.compile(r"`([^`]+)`")
NAMED_TEST = re.compile(r"tests/(?P<file>(?:\w+/)?test_\w+\.py)(::(?P<function>test_\w+))?$")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMAND = re.compile(r"recoveryctl((?: [a-z][a-z-]*)+)")
WRITTEN_OUT = re.compile(r'"(--[a-z][a-z-]*)')
NAMED_AFTER_A_PARAMETER = re.compile(r"^    (\w+): (?:Annotated\[.*Option\(|\w+Option\b)", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """Of a table; `option` is empty where the table has no such column."""

    what: str
    option: str
    tested: str

    def tests(self) -> list[str]:
        return [code for code in CODE.findall(self.tested) if code.startswith("tests/")]


def rows(text: str, part: str) -> list[Row]:
    """Of all tables below the heading `part`, to the next one of its level."""
    below = text.partition(f"\n{part}\n")[2]
    lines = re.split(r"^## ", below, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    three = [found for found in cells if found[-1] != "tested by"]
    return [Row(found[0], found[1] if part == PROMISED else "", found[-1]) for found in three]


@functools.cache
def functions_of(path: Path) -> set[str]:
    """Tests that a file defines; none if it is not there."""
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def sources() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "recovery").rglob("*.py"))


@functools.cache
def options() -> set[str]:
    """Every option of ours, as the sources write it or as typer makes it of a parameter's name."""
    named = NAMED_AFTER_A_PARAMETER.findall(sources())
    return {*WRITTEN_OUT.findall(sources()), *(f"--{name.replace('_', '-')}" for name in named)}


def is_a_command(word: str) -> bool:
    """Whether there is a command or a fault of that name."""
    return f'"{word}"' in sources() or f"def {word}(" in sources()


def mistakes(text: str) -> list[str]:
    """What is wrong with a page of guarantees, each in one line."""
    found = []
    promised, not_yet = rows(text, PROMISED), rows(text, NOT_YET)
    found += [f"no test: {row.what}" for row in promised if not row.tests()]
    found += [f"'not tested' is no guarantee: {row.what}" for row in promised if "not tested" in row.tested]
    found += [
        f"neither a test nor 'not tested': {row.what}"
        for row in not_yet
        if not row.tests() and "not tested" not in row.tested
    ]
    for row in promised + not_yet:
        for name in row.tests():
            match = NAMED_TEST.match(name)
            known = functions_of(ROOT / "tests" / match["file"]) if match else set()
            if match is None or not known or match["function"] not in known | {None}:
                found.append(f"no such test: {name}")
        code = "; ".join(CODE.findall(row.what + row.option))
        found += [f"no such option: {flag}" for flag in FLAG.findall(code) if flag not in options()]
        words = [word for line in COMMAND.findall(code) for word in line.split()]
        found += [f"no such command: {word}" for word in words if not is_a_command(word)]
        if not row.option and row in promised:
            found.append(f"no option, and no – instead: {row.what}")
    return found


def test_every_guarantee_names_a_test_that_exists_and_options_that_exist() -> None:
    assert mistakes(PAGE.read_text()) == []


def test_all_rows_of_the_page_were_read() -> None:
    text = PAGE.read_text()
    assert len(rows(text, PROMISED)) > 45
    assert len(rows(text, NOT_YET)) > 25


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("| Nothing is lost. | – | see the soak |", "no test: Nothing is lost."),
        ("| Nothing is lost. | – | not tested; `tests/log/test_log.py` |", "'not tested' is no guarantee"),
        ("| Nothing is lost. | – | `tests/test_nothing.py` |", "no such test: tests/test_nothing.py"),
        (
            "| Nothing is lost. | – | `tests/log/test_log.py::test_nothing` |",
            "no such test: tests/log/test_log.py",
        ),
        (
            "| Nothing is lost. | – | `tests/log/test_log.py::check` |",
            "no such test: tests/log/test_log.py::check",
        ),
        ("| Nothing is lost. | `--lossless` | `tests/log/test_log.py` |", "no such option: --lossless"),
        ("| Nothing is lost. | `recoveryctl rescue` | `tests/log/test_log.py` |", "no such command: rescue"),
        (
            "| Nothing, with `proxyd --lossless`. | – | `tests/log/test_log.py` |",
            "no such option: --lossless",
        ),
    ],
)
def test_a_guarantee_that_rests_on_nothing_is_noticed(row: str, wrong: str) -> None:
    (found,) = mistakes(
        f"# Page\n\n{PROMISED}\n\n| what holds | option | tested by |\n|---|---|---|\n{row}\n"
    )
    assert found.startswith(wrong)


def test_what_is_not_guaranteed_may_say_that_it_is_not_tested_and_must_if_it_is_not() -> None:
    page = f"# Page\n\n{NOT_YET}\n\n| what is not | what happens | tested by |\n|---|---|---|\n"
    assert mistakes(page + "| GPUs | none | not tested |\n") == []
    (found,) = mistakes(page + "| GPUs | none | some day |\n")
    assert found == "neither a test nor 'not tested': GPUs"
