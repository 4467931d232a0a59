"""How our commands speak: options by typer, one sentence per mistake, one table of exit statuses (errors.py).

A command's options are a frozen dataclass: each field is an option, its default the option's, its `option(…)`
what `--help` says of it.  So they are declared once, and read with types.
"""

from __future__ import annotations

import codecs
import dataclasses
import inspect
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

import typer
import typer.main

from understudy.proxy_client import variables
from understudy.recovery.base.errors import BadInput, ExitStatus, ForTheUser
from understudy.recovery.config.config_file import read as read_config
from understudy.recovery.config.config_file import unknown_variables, variable_prefix

# typer carries click along or requires it, by its version; what either raises at a mistake derives from this.
_Mistake: type[Any] = typer.BadParameter.__mro__[2]
INTERRUPTED = 128 + signal.SIGINT
CONTEXT = {"help_option_names": ["-h", "--help"]}
STATUSES = (
    "Exit status: 0 done, 1 found what is not as it should be, 2 usage, 3 nobody answers, "
    "4 refused or failed, 130 interrupted."
)
"""The end of every command's help."""

Options = TypeVar("Options")


def option(flag: str, text: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    """For a field of a class of options: its help is one sentence, in the box `panel`."""
    more.setdefault("show_envvar", False)  # they are all alike
    return typer.Option(flag, help=verbatim(text), rich_help_panel=panel, metavar=metavar, **more)


def verbatim(text: str) -> str:
    """For a help text: `[its newest]` would be taken for markup, and vanish."""
    return re.sub(r"\[(?=[a-z#/@])", r"\\[", text)


def show_version(wanted: bool) -> None:
    """What `--version` does."""
    if wanted:
        from understudy import __version__

        typer.echo(f"torch-understudy {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", help="Say which version this is.", callback=show_version, is_eager=True)


def command_of(options: type[Options], text: str, program: str = "") -> Any:
    """A command whose call answers its `options`; from its first word on that is none, all are arguments.

    `program`: a daemon, whose options may stand in a file (--config) and in variables (UNDERSTUDY_PROGRAM_…).
    """

    def read(version: bool = False, config: object = None, **given: Any) -> Options:
        return options(**given)

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
    ]
    hints["version"] = type_of_version()
    parameters.append(
        inspect.Parameter(
            "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hints["version"]
        )
    )
    context: dict[str, Any] = {**CONTEXT, "allow_interspersed_args": False}
    if program:
        hints["config"] = type_of_config()
        parameters.append(
            inspect.Parameter(
                "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints["config"]
            )
        )
        context["auto_envvar_prefix"] = variable_prefix(program)
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    read.__annotations__ = hints
    app = typer.Typer(context_settings=context)
    app.command(help=text, epilog=STATUSES)(read)
    return typer.main.get_command(app)


def type_of_version() -> Any:
    """The type of the parameter that stands for `--version`."""
    from typing import Annotated

    return Annotated[bool, VERSION]


def type_of_config() -> Any:
    """The type of the parameter that stands for `--config`."""
    from pathlib import Path
    from typing import Annotated

    return Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Read options from there, a line for each in YAML, as `devices: cuda:8`. Variables, as "
            "UNDERSTUDY_PROXYD_DEVICES, and this command line come before it.",
            metavar="FILE",
            show_envvar=False,
            callback=_take_from_file,
            is_eager=True,
        ),
    ]


def _take_from_file(context: typer.Context, path: Any) -> Any:
    """What `--config` does: what is in the file stands for what is not said otherwise."""
    if path is not None and not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **read_config(path, context.command)}
    return path


def given_to(command: Any, program: str, arguments: Sequence[str] | None = None) -> Any:
    """The options on a command line, by default ours; raises BadInput, and SystemExit after `--help`."""
    try:
        read = command.main(
            args=None if arguments is None else list(arguments), prog_name=program, standalone_mode=False
        )
    except _Mistake as mistake:
        raise BadInput(_sentence_of(mistake, program)) from None
    if isinstance(read, int):
        raise SystemExit(read)
    return read


_WORDS = {
    "Input should be a valid integer, unable to parse string as an integer": "a whole number is wanted",
    "Input should be a valid number, unable to parse string as a number": "a number is wanted",
}
"""Ours for those of a library that is meant for programmers."""


def _sentence_of(mistake: Any, program: str) -> str:
    near = list(getattr(mistake, "possibilities", None) or ())
    said = f"{mistake.message if near else mistake.format_message()}".strip().rstrip(".")
    for theirs, ours in _WORDS.items():
        said = said.replace(theirs, ours)
    if near:
        said += f": is {near[0]} meant?"
    context = getattr(mistake, "ctx", None)
    where = f"{_source_of(mistake, context)}see {context.command_path if context else program} --help"
    return f"{said[:1].lower()}{said[1:]} ({where})"


def _source_of(mistake: Any, context: Any) -> str:
    """Where a value stands that is not possible, if that is not the command line."""
    parameter = getattr(mistake, "param", None)
    if parameter is None or context is None:
        return ""
    source = getattr(context.get_parameter_source(parameter.name), "name", "")
    if source == "ENVIRONMENT":
        return f"from the variable {context.auto_envvar_prefix}_{parameter.name.upper()}; "
    return f"from --config {context.params.get('config')}; " if source == "DEFAULT_MAP" else ""


def say(program: str, sentence: str) -> None:
    """A line for the user, in one piece: others may write to the same place."""
    sys.stderr.write(f"{program}: {sentence}\n")
    sys.stderr.flush()


_PLAIN = {"–": "-", "…": "...", "✓": "x", "→": "->", "·": "-", "×": "x", "≥": ">=", "≤": "<="}


def _plainly(problem: UnicodeError) -> tuple[str, int]:
    assert isinstance(problem, UnicodeEncodeError)
    letters = problem.object[problem.start : problem.end]
    return "".join(_PLAIN.get(letter, "?") for letter in letters), problem.end


codecs.register_error("understudy.plain", _plainly)


def speak_as_the_terminal_does() -> None:
    """A letter that its encoding lacks becomes one that is like it, or a question mark: never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="understudy.plain")


def ends_of(program: str, work: Callable[[], int]) -> int:
    """The exit status of `work`; what is wrong is told in a sentence."""
    speak_as_the_terminal_does()
    try:
        return work()
    except ForTheUser as problem:
        say(program, str(problem))
        return problem.status
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def ends_of_app(program: str, app: typer.Typer) -> int:
    """The same of a command that has further ones."""

    def work() -> int:
        try:
            status = typer.main.get_command(app).main(prog_name=program, standalone_mode=False)
        except _Mistake as mistake:
            if type(mistake).__name__ == "NoArgsIsHelpError":
                mistake.show()
                return ExitStatus.USAGE
            raise BadInput(_sentence_of(mistake, program)) from None
        except BrokenPipeError:  # of `| head`: nobody reads on, and Python would complain as it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        return status if isinstance(status, int) else ExitStatus.DONE

    return ends_of(program, work)


def check_variables(program: str, command: Any = None, *, warn: bool = True) -> None:
    """Warns of UNDERSTUDY_ variables that mean nothing; raises BadInput for a value that is not possible.

    `command`: of a daemon, whose options are variables, too.
    """
    for sentence in variables.unknown(os.environ) if warn else ():
        say(program, sentence)
    for sentence in unknown_variables(os.environ, program, command) if warn and command is not None else ():
        say(program, sentence)
    if sentence := variables.complaint(os.environ):
        raise BadInput(sentence)
