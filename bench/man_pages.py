"""Man pages of proxyd, proxyrun and recoveryctl and each of its commands, from what `--help` is made of.

    python bench/man_pages.py FOLDER      then: man -l FOLDER/recoveryctl.1

Nothing is written that is not in the commands themselves, so that a page cannot say what a program does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from understudy import __version__
from understudy.recovery import recoveryctl
from understudy.recovery.config.proxyd_options import proxyd_command
from understudy.recovery.config.proxyrun_options import proxyrun_command

PROGRAMS: dict[str, Callable[[], Any]] = {
    "proxyd": proxyd_command,
    "proxyrun": proxyrun_command,
    "recoveryctl": lambda: typer.main.get_command(recoveryctl.app),
}
OF_ALL = "Options"
"""What options are called that are in no box of `--help`."""


@dataclass(frozen=True)
class Parameter:
    """An option or an argument."""

    usage: str
    help: str


@dataclass(frozen=True)
class Page:
    """What a page says of one command, in plain text."""

    path: tuple[str, ...]
    """recoveryctl, log, dump."""
    usage: str
    """Behind its name."""
    paragraphs: tuple[str, ...]
    arguments: tuple[Parameter, ...]
    options: dict[str, tuple[Parameter, ...]]
    """By their box in `--help`."""
    commands: dict[str, str] = field(default_factory=dict)
    """Its own, with what each does."""
    closing: str = ""

    @property
    def name(self) -> str:
        return "-".join(self.path)


def pages() -> Iterator[Page]:
    """Of all commands of all programs, each program before its own."""
    for program, command_of in PROGRAMS.items():
        yield from _pages_of(command_of(), program, None, "")


def _pages_of(command: Any, name: str, parent: Any, closing: str) -> Iterator[Page]:
    context = command.make_context(name, [], parent, resilient_parsing=True)
    closing = _plain(command.epilog) or closing
    commands = {key: one for key, one in getattr(command, "commands", {}).items() if not one.hidden}
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    options: dict[str, list[Parameter]] = {}
    for one in shown:
        if one.param_type_name == "option":
            options.setdefault(one.rich_help_panel or OF_ALL, []).append(_parameter(one, context))
    yield Page(
        path=tuple(context.command_path.split()),
        usage=" ".join(command.collect_usage_pieces(context)),
        paragraphs=tuple(_plain(part) for part in (command.help or "").split("\n\n") if part.strip()),
        arguments=tuple(_parameter(one, context) for one in shown if one.param_type_name == "argument"),
        options={panel: tuple(of_panel) for panel, of_panel in options.items()},
        commands={key: _plain((one.help or "").split("\n\n")[0]) for key, one in commands.items()},
        closing=closing,
    )
    for key, one in commands.items():
        yield from _pages_of(one, key, context, closing)


def _parameter(parameter: Any, context: Any) -> Parameter:
    usage, text = parameter.get_help_record(context)
    bounds = text.removeprefix(parameter.help or "").strip()  # what it is by default, from where to where
    return Parameter(usage, f"{_plain(parameter.help)} {bounds}".strip())


def _plain(text: str | None) -> str:
    """As `--help` shows it: without the markup of a terminal, in one line."""
    return " ".join(Text.from_markup(text or "").plain.split())


# ------------------------------------------------------------------ as groff reads it
NOTHING = "\\&"
_ESCAPED = {"\\": "\\(rs", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}


def escape(text: str) -> str:
    """A piece of a line that means nothing to groff, and that stays as it is when it is copied."""
    escaped = "".join(
        _ESCAPED.get(letter, letter if letter.isascii() else f"\\[u{ord(letter):04X}]") for letter in text
    )
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def roff(page: Page) -> str:
    """The page's source."""
    return "\n".join(_lines(page)) + "\n"


def _lines(page: Page) -> Iterator[str]:
    summary = page.paragraphs[0].partition(". ")[0].rstrip(".") if page.paragraphs else ""
    yield f'.TH "{escape(page.name.upper())}" 1 "" "torch\\-understudy {escape(__version__)}" "Understudy"'
    yield ".nh\n.ad l"  # a word that is broken cannot be copied
    yield f".SH NAME\n{escape(page.name)} \\- {escape(summary[:1].lower() + summary[1:])}"
    yield f".SH SYNOPSIS\n\\fB{escape(' '.join(page.path))}\\fR {escape(page.usage)}"
    yield ".SH DESCRIPTION"
    for paragraph in page.paragraphs:
        yield f".PP\n{escape(paragraph)}"
    yield from _list("ARGUMENTS", page.arguments)
    panels = list(page.options.items())
    if panels:
        yield ".SH OPTIONS"
    for panel, options in panels:
        if len(panels) > 1:
            yield f".SS {escape(panel)}"
        yield from _items(options)
    if page.commands:
        yield ".SH COMMANDS"
        for name, text in page.commands.items():
            its_page = f"\\fB{escape(f'{page.name}-{name}')}\\fR(1)"
            yield f".TP\n\\fB{escape(name)}\\fR\n{escape(text)} See {its_page}."
    if page.closing:
        title, _, text = page.closing.partition(": ")
        yield f".SH {escape(title.upper())}\n{escape(text)}"
    if others := list(_others(page)):
        yield ".SH SEE ALSO"
        yield ",\n".join(f"\\fB{escape(other)}\\fR(1)" for other in others)


def _list(title: str, parameters: Iterable[Parameter]) -> Iterator[str]:
    if items := list(_items(parameters)):
        yield f".SH {title}"
        yield from items


def _items(parameters: Iterable[Parameter]) -> Iterator[str]:
    for one in parameters:
        yield f".TP\n{' '.join(map(_word, one.usage.split()))}\n{escape(one.help) or NOTHING}"


def _word(word: str) -> str:
    """Flags are bold, what they take is not."""
    flag, comma, _ = word.partition(",")
    return f"\\fB{escape(flag)}\\fR{comma}" if word.startswith("-") else escape(word)


def _others(page: Page) -> Iterator[str]:
    if len(page.path) > 1:
        yield "-".join(page.path[:-1])
    yield from (name for name in PROGRAMS if name != page.path[0])


def write(folder: Path) -> list[Path]:
    """All of them; pages of commands that are gone are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for page in pages():
        path = folder / f"{page.name}.1"
        path.write_text(roff(page), encoding="ascii")
        written.append(path)
    for old in set(folder.glob("*.1")) - set(written):
        if old.name.removesuffix(".1").split("-")[0] in PROGRAMS:
            old.unlink()
    return written


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Write the man pages of all commands.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"{len(write(folder))} man pages in {folder}; read one with: man -l {folder / 'recoveryctl.1'}")


if __name__ == "__main__":
    main()
