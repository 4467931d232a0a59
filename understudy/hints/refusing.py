"""What evidently cannot be saved or entered again, named with variable and line before anything runs."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .iterating import is_enterable_kind
from .liveness import Names, writes
from .nodes import ITERATES
from .source import MISSING, HintError, Source, where

_MODULES = {
    "threading": (
        "Lock",
        "RLock",
        "Condition",
        "Event",
        "Semaphore",
        "BoundedSemaphore",
        "Barrier",
        "Thread",
    ),
    "socket": ("socket", "create_connection", "create_server", "socketpair"),
    "csv": ("reader", "writer"),
    "re": ("finditer",),
    "os": ("scandir", "walk", "popen"),
    "subprocess": ("Popen",),
    "sqlite3": ("connect",),
    "mmap": ("mmap",),
    "selectors": ("DefaultSelector",),
    "tempfile": ("TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile"),
    "concurrent.futures": ("ThreadPoolExecutor", "ProcessPoolExecutor"),
    "multiprocessing": ("Pool", "Process", "Queue", "Pipe"),
}


def refuse_what_is_evident(source: Source, saved: Mapping[int, Names]) -> None:
    """Raises HintError for the first thing that no checkpoint could hold."""
    for node in _own(source.tree.body):
        asked = isinstance(node, ast.For) and _asked(source, node.body)
        if asked and (what := _unsavable(source, node.iter)):
            raise HintError(
                f"{where(source.function, node)} has a hint inside a loop over {what}; make a list of it, or "
                "put the hint behind the loop."
            )
        if isinstance(node, ast.With) and _asked(source, node.body):
            for item in node.items:
                _refuse_manager(source, item.context_expr)
    _refuse_variables(source, saved)


def bound_lines(source: Source) -> dict[str, int]:
    """For each variable, the last line that gives it a value."""
    return {
        name: values[-1].lineno for name, values in _assigned(source).items() if hasattr(values[-1], "lineno")
    }


def _refuse_variables(source: Source, saved: Mapping[int, Names]) -> None:
    lines = {hint.number: hint.line for hint in source.hints.values() if not hint.proposed}
    for name, values in _assigned(source).items():
        found = [_unsavable(source, value) for value in values]
        held = [number for number in lines if name in saved[number]]
        if held and all(found):
            raise HintError(
                f"{where(source.function, values[-1])} lets {name!r} be {found[-1]}, and it may be read "
                f"behind the hint in line {lines[held[0]]}; make it behind the hint, or give it up before "
                f"(del {name})."
            )


def _assigned(source: Source) -> dict[str, list[ast.AST]]:
    """The values that each variable is given; parameters and targets have ones that are not evident."""
    arguments = source.tree.args
    found: dict[str, list[ast.AST]] = {}
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        found.setdefault(argument.arg, []).append(argument)
    for node in _own(source.tree.body):
        if isinstance(node, ast.Delete):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
            plain = [each.id for each in targets if isinstance(each, ast.Name)]
            value: ast.AST | None = node.value if len(plain) == len(targets) else node
            names: Iterable[str] = plain if value is not node else writes(node)
        elif isinstance(node, ast.For | ast.withitem):
            value, names = node, writes(node.target if isinstance(node, ast.For) else node.optional_vars)
        elif isinstance(node, ast.stmt | ast.pattern):
            value, names = node, writes(node)
        else:
            continue
        if value is not None:
            for name in names:
                found.setdefault(name, []).append(value)
    return found


def _unsavable(source: Source, node: ast.AST) -> str | None:
    """What an expression evidently is, if that cannot be saved."""
    if isinstance(node, ast.GeneratorExp):
        return "a generator in progress"
    if isinstance(node, ast.ClassDef):
        return "a class that is made inside the function"
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id in source.generators & source.locals:
        return f"the generator {node.func.id} in progress"
    called = source.resolve(node.func)
    if isinstance(called, types.FunctionType) and inspect.isgeneratorfunction(called):
        return f"the generator {called.__name__} in progress"
    if isinstance(node.func, ast.Name) and node.func.id in ITERATES:
        inner = (_unsavable(source, each) for each in node.args[ITERATES[node.func.id] :])
        return next((each for each in inner if each), None)
    if called is not MISSING:
        for module, names in _MODULES.items():
            holder = sys.modules.get(module)
            for name in names:
                if called is getattr(holder, name, MISSING):
                    return f"what {module}.{name}() makes, which cannot be saved"
    return None


def _refuse_manager(source: Source, node: ast.expr) -> None:
    called = source.resolve(node.func) if isinstance(node, ast.Call) else MISSING
    name = ast.unparse(node)[:40]
    made_of_generator = hasattr(called, "__wrapped__") and inspect.isgeneratorfunction(called.__wrapped__)
    if made_of_generator or (isinstance(called, type) and not _may_be_entered(called)):
        raise HintError(
            f"{where(source.function, node)} has a hint inside `with {name}`, which cannot be entered a "
            "second time in another process; put the hint outside."
        )


def _may_be_entered(kind: type) -> bool:
    return is_enterable_kind(kind) or not hasattr(kind, "__enter__")


def _asked(source: Source, body: list[ast.stmt]) -> bool:
    """Whether there is a hint inside that was not merely proposed."""
    found = (source.hints.get(each) for node in body for each in ast.walk(node))  # type: ignore[call-overload]
    return any(hint is not None and not hint.proposed for hint in found)


def _own(body: list[ast.stmt]) -> Iterator[Any]:
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += reversed(list(ast.iter_child_nodes(node)))
