"""Man pages say what `--help` says, of every command, and groff has nothing to complain of."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import man_pages
import pytest
from man_pages import PROGRAMS, Page, Parameter, escape, pages, roff, write
from rich.text import Text

GROFF = shutil.which("groff")
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def tree(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from tree(one, *path, name)


COMMANDS = {path: command for name, make in PROGRAMS.items() for path, command in tree(make(), name)}


def rendered(source: str) -> str:
    """As a terminal shows it, in one line; skips without groff, fails where it warns."""
    if GROFF is None:
        pytest.skip("groff is not here")
    command = [GROFF, "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=300n"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "", done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_a_page_has_each_option_argument_and_command_of_its_help_in_the_same_words(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)  # the variable is read only once in a process
    command = COMMANDS[path]
    command.main(args=["--help"], prog_name=" ".join(path), standalone_mode=False)
    shown = [" ".join(line.strip("│ \n").split()) for line in capsys.readouterr().out.splitlines()]
    (page,) = [page for page in pages() if page.path == path]
    text = rendered(roff(page))
    flags = {flag for line in shown if line for flag in FLAG.findall(line)}
    assert flags and flags <= set(FLAG.findall(text))
    for one in command.params:
        if getattr(one, "hidden", False):
            assert not flags.intersection(one.opts)
            continue
        words = " ".join(Text.from_markup(one.help or "").plain.split())
        assert words in text
        assert any(words in line for line in shown), f"{words!r} is not in --help"
    for name, one in getattr(command, "commands", {}).items():
        summary = " ".join(Text.from_markup(one.help.split("\n\n")[0]).plain.split())
        assert f"{name} {summary}" in text and f"{'-'.join((*path, name))}(1)" in text


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_nothing_in_a_help_text_vanishes_as_markup(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    for text in (command.help, command.epilog, *(one.help for one in command.params)):
        assert Text.from_markup(text or "").plain == (text or "").replace("\\[", "["), path


def test_there_is_a_page_for_each_command_and_none_for_one_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "recoveryctl-gone.1").write_text("")
    (tmp_path / "another-program.1").write_text("")
    written = {path.name for path in write(tmp_path)}
    assert written == {f"{'-'.join(path)}.1" for path in COMMANDS}
    assert {path.name for path in tmp_path.iterdir()} == written | {"another-program.1"}


def test_what_groff_would_take_for_its_own_stays_text() -> None:
    odd = r"'.SH' \fBx\fR ^~`…`  .TH"
    page = Page(
        ("it",), ".x \\n", (odd, ".PP at the beginning", "'br too"), (Parameter(".tr ab", "\\c"),), {}
    )
    text = rendered(roff(page))
    for words in (" ".join(odd.split()), ".PP at the beginning", "'br too", ".tr ab \\c", "it .x \\n"):
        assert words in text
    assert escape("") == ""


def test_pages_are_the_same_each_time_and_tell_of_defaults_and_exit_statuses() -> None:
    first, second = ([roff(page) for page in pages()] for _ in range(2))
    assert first == second
    proxyd = rendered(first[0])
    assert "--spares N Keep so many warm device servers beside one per device. [default: 1]" in proxyd
    assert "EXIT STATUS 0 done, 1 found" in proxyd and "Several hosts" in proxyd


def test_the_program_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["man_pages.py", str(tmp_path / "man")])
    man_pages.main()
    assert f"{len(COMMANDS)} man pages in {tmp_path / 'man'}" in capsys.readouterr().out
    assert (tmp_path / "man" / "recoveryctl.1").read_text().startswith(".TH")
