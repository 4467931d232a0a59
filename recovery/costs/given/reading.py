"""A bill's inputs, from a YAML file and other sources; each value knows where it came from."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.yaml_file import compose
from understudy.recovery.costs.given.inputs import Inputs

DEEPEST = 4
"""Names in a row; aliases could nest sections without end."""
MOST_VALUES = 1000
EXAMPLE = Path(__file__).with_name("example.yaml")
Name = tuple[str, ...]
"""Of a value: ("job", "gpus")."""


@dataclass(frozen=True)
class Known:
    """A value, and where it is from, in words."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Read:
    """`origins`: path of each value, with dots -> its origin."""

    inputs: Inputs
    origins: Mapping[str, str]


def combined(*sources: Mapping[Name, Known]) -> Read:
    """What an earlier source says stands.  Raises BadInput: one sentence."""
    known: dict[Name, Known] = {}
    for source in sources:
        for path, value in source.items():
            known.setdefault(path, value)
    tree: dict[str, Any] = {}
    for path, one in known.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise BadInput(f"{'.'.join(path)} ({one.origin}) lies inside of something that is a value")
        place[path[-1]] = one.value
    try:
        inputs = Inputs.model_validate(tree)
    except ValidationError as problem:
        raise BadInput(_sentence(problem, known)) from None
    return Read(inputs, {".".join(path): one.origin for path, one in known.items()})


# ------------------------------------------------------------------ a file
def of_file(path: Path) -> dict[Name, Known]:
    """Every value with its line.  Raises BadInput."""
    node = compose(path)
    if not isinstance(node, yaml.MappingNode):
        raise BadInput(f"{path} holds no inputs: recoveryctl cost --example shows what is expected")
    found = dict(islice(_values(node, (), path), MOST_VALUES + 1))
    if len(found) > MOST_VALUES:
        raise BadInput(f"{path} has more than {MOST_VALUES} values: that is no such file")
    return found


def _values(node: yaml.MappingNode, above: Name, file: Path) -> Iterator[tuple[Name, Known]]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise BadInput(f"{file}, line {line}: a name is wanted")
        path = (*above, key.value)
        if key.value in seen:
            raise BadInput(
                f"{file}, line {line}: {'.'.join(path)} was given in line {seen[key.value]} already"
            )
        seen[key.value] = line
        if isinstance(value, yaml.MappingNode) and len(path) < DEEPEST:
            yield from _values(value, path, file)
        elif isinstance(value, yaml.ScalarNode):
            yield path, Known(_plain(value, f"{file}, line {line}"), f"{file}, line {line}")
        else:
            raise BadInput(f"{file}, line {line}: {'.'.join(path)} must be one value")


def _plain(node: yaml.ScalarNode, where: str) -> Any:
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):  # a tag of somebody's own, a 13th month
        raise BadInput(f"{where}: {node.value[:40]!r} is no number and no text") from None


# ------------------------------------------------------------------ what is wrong, in a sentence
def _sentence(problem: ValidationError, known: Mapping[Name, Known]) -> str:
    errors = problem.errors(include_url=False)
    error = min(errors, key=lambda one: one["type"] != "extra_forbidden")  # it lacks elsewhere
    path = tuple(str(part) for part in error["loc"] if part != "[key]")
    name = ".".join(path)
    origin = next((f" ({one.origin})" for at, one in known.items() if at[: len(path)] == path and path), "")
    more = f" (and {problem.error_count() - 1} more)" if problem.error_count() > 1 else ""
    if error["type"] == "missing":
        return f"{name} is missing{more}; recoveryctl cost --example shows what is expected"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _names(path[:-1]), 1)
        meant = f"is {near[0]} meant?" if near else f"there are {', '.join(_names(path[:-1]))}"
        return f"{name}{origin} is unknown: {meant}{more}"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return f"{name}: {text}{origin}{more}" if path else f"{text}{more}"
    shown = f"{error['input']!r}"
    what = str(error["msg"]).removeprefix("Input should be ")
    return f"{name} is {shown[:60]}{origin}: it should be {what}{more}"


def _names(section: Name) -> Sequence[str]:
    """Fields of a section."""
    model: type[BaseModel] = Inputs
    for part in section:
        field = model.model_fields.get(part)
        if field is None:
            return ()
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        models = [kind for kind in kinds if issubclass(kind, BaseModel)]
        if not models:
            return ()
        model = models[0]
    return tuple(model.model_fields)
