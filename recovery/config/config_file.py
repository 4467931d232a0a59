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
from understudy.recovery.base.yaml_file import compose

_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))


def variable_prefix(program: str) -> str:
    """What the names of a program's variables begin with, without the _ behind it."""
    return f"UNDERSTUDY_{program.upper()}"


def read(path: Path, command: Any) -> dict[str, str]:
    """Values by the names of a command's parameters, as they are written there; raises BadInput."""
    from yaml.nodes import MappingNode, ScalarNode

    shown = f"--config {path}"
    node = compose(path, shown)
    if node is None:
        return {}
    if not isinstance(node, MappingNode):
        raise BadInput(f"{shown} holds no options: write a line for each, as `devices: cuda:8`")
    options, found = options_of(command), {}
    for name, value in node.value:
        where = f"{shown}, line {name.start_mark.line + 1}"
        if not isinstance(name, ScalarNode) or name.value not in options:
            said = name.value if isinstance(name, ScalarNode) else "of such a name"
            near = difflib.get_close_matches(str(said), options, n=1, cutoff=0.0)[0]
            raise BadInput(f"{where}: there is no option {said[:80]}: is {near} meant?")
        if not isinstance(value, ScalarNode) or value.tag not in _PLAIN:
            raise BadInput(f"{where}: {name.value} wants a word or a number")
        if options[name.value].name in found:
            raise BadInput(f"{where}: {name.value} stands there twice")
        found[options[name.value].name] = value.value
    return found


def options_of(command: Any) -> dict[str, Any]:
    """A command's parameters by the names that a file has for them: their flags without the dashes."""
    return {
        one.opts[0].removeprefix("--"): one
        for one in command.params
        if one.param_type_name == "option" and not one.is_eager and not one.hidden
    }


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
