"""A campaign from its YAML file; what is wrong with it is one sentence, with the line."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from understudy.campaigns.files import content, short
from understudy.campaigns.planning.faults import KINDS
from understudy.campaigns.planning.spec import DATA, MODELS, Campaign
from understudy.campaigns.planning.variants import VARIANTS
from understudy.recovery.base.errors import BadInput

LARGEST_FILE = 1 << 20
DEEPEST = 8
MOST_NODES = 20_000
NAMES = (*KINDS, *VARIANTS, *DATA, *MODELS)
"""What values may be meant to be."""


def of_file(path: Path) -> Campaign:
    """Raises BadInput."""
    try:
        text = content(path, LARGEST_FILE)
    except (OSError, ValueError) as problem:
        raise BadInput(f"{path} cannot be read: {short(problem)}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[tuple[str, ...], int] = {}
        tree = _plain(node, (), lines, path, set()) if node is not None else None
    except (yaml.YAMLError, UnicodeError, RecursionError, ValueError) as problem:
        if isinstance(problem, BadInput):
            raise
        mark = getattr(problem, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(problem, "problem", None) or type(problem).__name__
        raise BadInput(f"{path}{where} is no YAML: {what}") from None
    if not isinstance(tree, dict):
        raise BadInput(f"{path} holds no campaign: recoveryctl campaign example prints one")
    try:
        return Campaign.model_validate(_beside(path, tree))
    except ValidationError as problem:
        raise BadInput(_sentence(problem, path, lines)) from None


def _beside(file: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Relative paths are relative to the file."""
    for name in ("text", "mnist"):
        if isinstance(tree.get(name), str):
            tree[name] = str(file.parent / tree[name])
    suites = tree.get("suites")
    for suite in suites if isinstance(suites, list) else ():
        schedule = suite.get("schedule") if isinstance(suite, dict) else None
        if isinstance(schedule, dict) and isinstance(schedule.get("file"), str):
            schedule["file"] = str(file.parent / schedule["file"])
    return tree


def _plain(
    node: Any, at: tuple[str, ...], lines: dict[tuple[str, ...], int], file: Path, above: set[int]
) -> Any:
    """The value of a node; `lines` gets that of each place. Aliases cannot nest without end."""
    lines[at] = node.start_mark.line + 1
    if len(at) > DEEPEST or len(lines) > MOST_NODES or id(node) in above:
        raise BadInput(f"{file}, line {lines[at]}: it is nested too deeply, or too long")
    if isinstance(node, yaml.ScalarNode):
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError):
            raise BadInput(
                f"{file}, line {lines[at]}: {node.value[:40]!r} is no number and no text"
            ) from None
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, (*at, str(number)), lines, file, above) for number, one in enumerate(node.value)]
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise BadInput(f"{file}, line {line}: a name is wanted")
        if key.value in found:
            raise BadInput(f"{file}, line {line}: {key.value} is given twice")
        found[key.value] = _plain(value, (*at, key.value), lines, file, above)
        lines[(*at, key.value)] = line
    return found


# ------------------------------------------------------------------ what is wrong, in a sentence
def _sentence(problem: ValidationError, file: Path, lines: dict[tuple[str, ...], int]) -> str:
    errors = problem.errors(include_url=False)
    error = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    at = tuple(str(part) for part in error["loc"])
    place = _known_place(at, lines)
    where = f"{file}, line {lines[place]}" if place else str(file)
    name = ".".join(place)
    more = f" (and {problem.error_count() - 1} more)" if problem.error_count() > 1 else ""
    if error["type"] == "missing":
        return (
            f"{where}: {'.'.join((*place, at[-1]))} is missing{more}; recoveryctl campaign example shows it"
        )
    if error["type"] == "extra_forbidden":
        names = list(_names_beside(error["loc"]))
        near = difflib.get_close_matches(at[-1], names, 1)
        meant = f"is {near[0]} meant?" if near else f"there are {', '.join(names)}"
        return f"{where}: {at[-1]} is unknown: {meant}{more}"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return f"{where}: {text}{_nearest(error['input'])}{more}"
    what = str(error["msg"]).removeprefix("Input should be ").removeprefix("Input tag ")
    return f"{where}: {name} is {error['input']!r:.60}: it should be {what}{_nearest(error['input'])}{more}"


def _nearest(given: Any) -> str:
    """The name that a wrong one is next to."""
    words = given if isinstance(given, list | tuple) else [given]
    for word in words:
        if isinstance(word, str) and word not in NAMES:
            near = difflib.get_close_matches(word, NAMES, 1)
            return f"; is {near[0]} meant?" if near else ""
    return ""


def _known_place(at: Sequence[str], lines: dict[tuple[str, ...], int]) -> tuple[str, ...]:
    """The innermost place of the file in a location, which has names of alternatives in it besides."""
    place: tuple[str, ...] = ()
    for part in at:
        if (*place, part) in lines:
            place = (*place, part)
    return place


def _names_beside(at: Sequence[Any]) -> Iterator[str]:
    """Fields of the model that a location's last part is in."""
    models: list[type[BaseModel]] = [Campaign]
    for part in at[:-1]:
        if isinstance(part, int):
            continue
        tagged = [model for model in models if _tag(model) == part]
        inner = [
            kind
            for model in models
            if (field := model.model_fields.get(str(part))) is not None
            for kind in _models_in(field.annotation)
        ]
        models = tagged or inner or models
    for model in models:
        for name, field in model.model_fields.items():
            yield field.alias or name


def _tag(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("kind")
    return str(get_args(kind.annotation)[0]) if kind is not None else ""


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, tuple) or get_args(annotation):
        for inner in get_args(annotation):
            yield from _models_in(inner)
