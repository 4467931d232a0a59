"""Options of a daemon that are not on its command line: a YAML file of `--config`, and environment variables.

Both are what the command line's library has for it (click: default_map, auto_envvar_prefix), so every option
can be written in any of the three ways, and none is declared twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from understudy.recovery.base.errors import BadInput

LARGEST = 1 << 20
"""Bytes of a file."""
_SWITCHES = {True: "on", False: "off"}
"""YAML takes `on` and `off` for truth values, where an option may want the word."""


def variable_prefix(program: str) -> str:
    """What the names of a program's variables begin with, without the _ behind it."""
    return f"UNDERSTUDY_{program.upper()}"


def read(path: Path, command: Any) -> dict[str, Any]:
    """Values by the names of a command's parameters; raises BadInput."""
    import yaml

    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as problem:
        raise BadInput(f"--config {path} cannot be read: {problem.strerror}") from problem
    if len(raw) > LARGEST:
        raise BadInput(f"--config {path} has more than {LARGEST >> 20} MiB: it is no file of options")
    try:
        told = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise BadInput(f"--config {path} is no YAML{where}") from problem
    if told is None:
        return {}
    if not isinstance(told, dict):
        raise BadInput(f"--config {path} holds no options: write a line for each, as `devices: cuda:8`")
    options = options_of(command)
    return dict(_value(path, name, value, options) for name, value in told.items())


def options_of(command: Any) -> dict[str, Any]:
    """A command's parameters by the names that a file has for them: their flags without the dashes."""
    return {
        one.opts[0].removeprefix("--"): one
        for one in command.params
        if one.param_type_name == "option" and not one.is_eager and not one.hidden
    }


def _value(path: Path, name: object, value: object, options: Mapping[str, Any]) -> tuple[str, object]:
    """The parameter's name, and what it is given; raises BadInput."""
    if not isinstance(name, str) or name not in options:
        near = difflib.get_close_matches(str(name), options, n=1, cutoff=0.0)[0]
        raise BadInput(f"--config {path}: there is no option {str(name)[:80]}: is {near} meant?")
    option = options[name]
    if isinstance(value, bool):
        return option.name, value if option.is_flag else _SWITCHES[value]
    if option.is_flag or not isinstance(value, str | int | float):
        wanted = "true or false" if option.is_flag else "a word or a number"
        raise BadInput(f"--config {path}: {name} wants {wanted}, not {str(value)[:80]!r}")
    return option.name, str(value)


def unknown_variables(environment: Mapping[str, str], program: str, command: Any) -> list[str]:
    """A sentence for each variable that looks like an option of this program and is none."""
    prefix = f"{variable_prefix(program)}_"
    names = [prefix + one.name.upper() for one in options_of(command).values()]
    names.append(f"{prefix}CONFIG")
    return [
        f"the environment variable {name} is not known and has no effect: "
        f"is {difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]} meant?"
        for name in sorted(environment)
        if name.startswith(prefix) and name not in names
    ]
