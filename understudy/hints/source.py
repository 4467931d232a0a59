"""What a decorated function says in its source, and what of it cannot be resumed (paper 000 §3.1, §5.3.1).

Everything here happens at decoration: nothing of the function has run when it is refused.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()
_SEES_EVERYTHING = frozenset({"locals", "eval", "exec", "vars", "dir"})
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPREHENSION_CODE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_FUTURES = 0x1FE0000  # what `from __future__ import …` leaves in a code object's flags


class HintError(RuntimeError):
    """A function cannot be resumed, or a checkpoint of it cannot be taken or read."""


@dataclass(frozen=True)
class Hint:
    """A place where a checkpoint may be taken: numbered from 1 on in the order of the source."""

    number: int
    line: int
    proposed: bool
    """By hints="auto"; such a place is left out where its state cannot be saved."""


@dataclass(frozen=True)
class Source:
    """A function as a syntax tree whose lines are those of its file."""

    function: types.FunctionType
    tree: ast.FunctionDef
    hints: dict[ast.stmt, Hint]
    generators: frozenset[str]
    """Names of functions inside it that are generators."""

    @property
    def locals(self) -> frozenset[str]:
        code = self.function.__code__
        return frozenset(code.co_varnames + code.co_cellvars)

    @property
    def captured(self) -> frozenset[str]:
        """Its variables that functions inside it may read at any time."""
        return frozenset(_captured(self.function.__code__)) & self.locals

    @property
    def digest(self) -> str:
        """Of what the function does: comments and spaces do not count, where the hints are does."""
        return hashlib.blake2b(ast.dump(self.tree).encode(), digest_size=16).hexdigest()

    def numbers(self, *nodes: ast.AST) -> tuple[int, ...]:
        """The hints inside these nodes."""
        found = (self.hints.get(each) for node in nodes for each in ast.walk(node))  # type: ignore[call-overload]
        return tuple(sorted(hint.number for hint in found if hint is not None))

    def resolve(self, node: ast.expr) -> Any:
        """The object that a dotted name stands for at decoration; MISSING where that is not evident."""
        return resolve(self.function, self.locals, node)


def read(function: Any, hint: Callable[[], None], auto: bool) -> Source:
    """The source of a function, if it is one that can be resumed. Raises HintError, in one sentence.

    `hint`: the function whose calls mark places. `auto`: propose places at the ends of loop bodies, too.
    """
    _check_kind(function)
    tree = _parse(function)
    names = frozenset(function.__code__.co_varnames + function.__code__.co_cellvars)

    def is_hint(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and resolve(function, names, node.func) is hint

    _check_calls(function, tree, names)
    placed = list(_placed(tree.body, is_hint))
    _check_places(function, tree, placed, is_hint)
    proposed = set(_propose(tree.body, is_hint)) if auto else set()
    if not placed and not proposed:
        what = "no loop whose body could end with a hint" if auto else "no hint"
        raise HintError(
            f"{where(function, tree)} has {what}; call checkpoint() where it may be cut, or take the "
            "decorator away."
        )
    marks = [each for each in _statements(tree.body) if each in proposed or each in placed]
    hints = {each: Hint(n, each.lineno, each in proposed) for n, each in enumerate(marks, 1)}
    generators = frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _yields(node)
    )
    return Source(function, tree, hints, generators)


def where(function: Any, node: ast.AST | None = None) -> str:
    """A function and a line, as errors name them."""
    code = function.__code__
    return f"{function.__qualname__} ({code.co_filename}:{getattr(node, 'lineno', code.co_firstlineno)})"


def resolve(function: Any, local: frozenset[str], node: ast.expr) -> Any:
    """The object of a dotted name, by lookups that run no code; MISSING where it is not evident."""
    if isinstance(node, ast.Attribute):
        holder = resolve(function, local, node.value)
        return (
            vars(holder).get(node.attr, MISSING) if isinstance(holder, types.ModuleType | type) else MISSING
        )
    if not isinstance(node, ast.Name) or node.id in local:
        return MISSING
    if node.id in function.__code__.co_freevars:
        cell = function.__closure__[function.__code__.co_freevars.index(node.id)]
        try:
            return cell.cell_contents
        except ValueError:
            return MISSING
    found = function.__globals__.get(node.id, MISSING)
    return vars(builtins).get(node.id, MISSING) if found is MISSING else found


def _check_kind(function: Any) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, types.FunctionType):
        raise HintError(
            f"{name} is a {type(function).__name__}; decorate a function that is written in Python."
        )
    if hasattr(function, "__wrapped__"):
        raise HintError(f"{name} is wrapped by another decorator; put @checkpoints next to its def.")
    flags = function.__code__.co_flags
    for flag, what in (
        (inspect.CO_GENERATOR, "a generator"),
        (inspect.CO_COROUTINE, "an async function"),
        (inspect.CO_ASYNC_GENERATOR, "an async generator"),
    ):
        if flags & flag:
            raise HintError(
                f"{where(function)} is {what}, which cannot be resumed; let a plain function hold the loop."
            )
    if function.__name__ == "<lambda>":
        raise HintError(f"{where(function)} is a lambda, which cannot hold a hint; write it as a def.")


def _parse(function: types.FunctionType) -> ast.FunctionDef:
    """Raises HintError where the source cannot be had, or is not what runs."""
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        text = "".join(lines)
        indented = text[:1].isspace()
        module = ast.parse("if True:\n" + text if indented else text)
        ast.increment_lineno(module, first - 1 - indented)
        body = module.body[0].body if isinstance(module.body[0], ast.If) and indented else module.body
        tree = next(node for node in body if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration, IndexError):
        raise HintError(
            f"The source of {where(function)} cannot be had; write the function in a file."
        ) from None
    tree.decorator_list = []
    _check_that_it_is_what_runs(function, tree)
    return tree


def _check_that_it_is_what_runs(function: types.FunctionType, tree: ast.FunctionDef) -> None:
    code = function.__code__
    if "@pytest_ar" in code.co_names:  # pytest has rewritten its assertions
        return
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if tree.name != code.co_name or not set(code.co_varnames) <= {
        *names,
        *defined,
        *(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)),
        *(node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name),
        *(
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name
        ),
        *(node.rest for node in ast.walk(tree) if isinstance(node, ast.MatchMapping) and node.rest),
        *(
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ),
    }:
        raise HintError(
            f"The source of {where(function)} is not that of the function that runs; import the module anew."
        )


def _check_calls(function: Any, tree: ast.FunctionDef, names: frozenset[str]) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name = node.func.id
        sees = name in ("eval", "exec") or (name in _SEES_EVERYTHING and not node.args)
        if sees and resolve(function, names, node.func) is getattr(builtins, name):
            raise HintError(
                f"{where(function, node)} calls {name}(), which reads variables that nobody can see; name "
                "them instead."
            )


def _check_places(
    function: Any, tree: ast.FunctionDef, placed: list[ast.stmt], is_hint: Callable[[ast.AST], bool]
) -> None:
    known = {each.value for each in placed if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if is_hint(node) and node not in known:
            raise HintError(
                f"{where(function, node)} calls checkpoint() inside an expression, a lambda, a function or a "
                "class; it must be a statement of the decorated function itself."
            )
        if isinstance(node, ast.TryStar) and any(each in known for each in ast.walk(node)):
            raise HintError(
                f"{where(function, node)} has a hint inside a try with except*, which cannot be resumed; put "
                "the hint outside."
            )


def _placed(body: list[ast.stmt], is_hint: Callable[[ast.AST], bool]) -> Iterator[ast.stmt]:
    return (each for each in _statements(body) if isinstance(each, ast.Expr) and is_hint(each.value))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All of a function's own, in the order of the source."""
    for statement in body:
        yield statement
        if not isinstance(statement, _INNER):
            for block in blocks(statement):
                yield from _statements(block)


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks that a compound statement is made of, in the order of the source."""
    if isinstance(getattr(statement, "body", None), list):
        yield statement.body  # type: ignore[attr-defined]
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body
    for name in ("orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block


def _propose(body: list[ast.stmt], is_hint: Callable[[ast.AST], bool]) -> list[ast.stmt]:
    """Append a hint to each loop's body that does not end with one, or with a jump (paper §5.3.1)."""
    proposed: list[ast.stmt] = []
    for statement in list(_statements(body)):
        if isinstance(statement, ast.For | ast.While):
            last = statement.body[-1]
            ends = isinstance(last, ast.Break | ast.Continue | ast.Return | ast.Raise)
            if not ends and not (isinstance(last, ast.Expr) and is_hint(last.value)):
                mark = ast.Expr(ast.Call(ast.Name("checkpoint", ast.Load()), [], []))
                ast.copy_location(mark, last)
                mark.lineno = last.end_lineno or last.lineno
                ast.fix_missing_locations(mark)
                statement.body.append(mark)
                proposed.append(mark)
    return proposed


def _yields(function: ast.FunctionDef) -> bool:
    own = [each for statement in function.body for each in _own_nodes(statement)]
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in own)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, _INNER):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def _captured(code: types.CodeType) -> set[str]:
    found: set[str] = set()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _captured(inner) if inner.co_name in _COMPREHENSION_CODE else set(inner.co_freevars)
    return found
