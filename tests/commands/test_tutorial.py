"""What docs/tutorial.md and the README show is what happens: all commands are typed, and outputs compared."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import tour
from documented_commands import AWAITED_S, TUTORIAL, Chapter, Differs, Step, chapters, follow, steps_of
from proxied import left_behind
from terminal import Terminal, block_below
from training_run import BIN, ROOT

README = ROOT / "README.md"
CHAPTERS = chapters(TUTORIAL.read_text())
LONGEST_CHAPTER = 25
"""Lines that are not empty, but for the commands' output."""


@pytest.fixture
def person(folder: Path) -> dict[str, str]:
    """The environment of one who has our programs on the PATH, started as tests start them."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("proxyrun", "recoveryctl", "torchrun"):
        _program(programs / name, f'{sys.executable} {BIN / name} "$@"')
    _program(programs / "proxyd", f'{sys.executable} -P -m understudy.recovery.proxyd "$@"')
    _program(programs / "python", f'{sys.executable} "$@"')
    wide = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return wide | {"PATH": f"{programs}:{os.environ['PATH']}", "TERM": "dumb"}


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\nexec {line}\n")
    path.chmod(0o755)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.title)
def test_a_chapter_shows_what_its_commands_say(
    chapter: Chapter, folder: Path, person: dict[str, str]
) -> None:
    terminal = tour.terminal_in(folder, person)
    try:
        follow(chapter.steps, terminal)
    finally:
        terminal.close()
    assert left_behind() == []


@pytest.mark.drawn(3)
def test_the_commands_of_the_readme_succeed_one_after_the_other(
    folder: Path, person: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    commands = block_below(README.read_text(), "## Use it")
    assert tour.play(commands, folder, person) == 0
    shown = capsys.readouterr().out
    for line in commands:
        assert f"$ {line}" in shown
    assert "recovered" in shown and "is in restored" in shown
    assert "goes on behind step" in shown.partition("is in restored")[2]
    assert left_behind() == []


def test_the_readme_fits_a_screen() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 60
    assert [line for line in lines if len(line) > 100] == []


def test_the_chapters_of_the_tutorial_are_short_and_have_commands() -> None:
    assert [chapter.number for chapter in CHAPTERS] == list(range(1, 10))
    for chapter in CHAPTERS:
        shown = sum(len(step.shown.splitlines()) for step in chapter.steps)
        assert chapter.lines - shown <= LONGEST_CHAPTER, chapter.title
        assert chapter.steps, chapter.title


@pytest.mark.parametrize(
    ("shown", "said", "same"),
    [
        ("a 1 b\n", "a 1 b\n", True),
        ("a … b\n", "a 17 s, or so b   \n", True),
        ("a … b\n", "a 17 c\n", False),
        ("a … b\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nd\n", True),
        ("a\n", "a\nb\n", False),
        ("", "a\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_dots_stand_for_anything_and_nothing_else_does(shown: str, said: str, same: bool) -> None:
    assert Step("", shown).is_what(said) is same


def typed(page: str, folder: Path, awaited_s: float = AWAITED_S) -> None:
    terminal = Terminal(folder)
    try:
        follow(steps_of(f"```console\n{page}```\n"), terminal, awaited_s)
    finally:
        terminal.close()


def test_a_page_is_followed_with_its_background_its_statuses_and_its_variables(tmp_path: Path) -> None:
    typed(
        f"$ mkfifo {tmp_path}/more\n$ (echo 1; read line <more; echo 2; echo $line) &\n1\n"
        "$ cd /\n$ where=$(pwd)  # here\n$ echo $where\n/\n$ false\n$ echo $?\n1\n"
        f"$ echo 3 >{tmp_path}/more\n$ wait\n2\n…\n$ echo over\nover\n",
        tmp_path,
    )


@pytest.mark.parametrize(
    "page", ["$ echo 1\n2\n", "$ echo 1\n", "$ false\n", "$ (echo 1; read line <more) &\n2\n"]
)
def test_a_page_that_does_not_tell_the_truth_is_noticed(page: str, tmp_path: Path) -> None:
    with pytest.raises(Differs):
        typed(page, tmp_path, awaited_s=0.5)
