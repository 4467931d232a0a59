"""A function, rewritten into an equal one that can be entered at its hints (paper 000 §3.3).

The paper lifts tasks into functions of their own; this keeps the function whole. While `at` is a hint's
number, the function is on its way to it: plain statements are passed over, loops, branches and blocks that
lead there are entered without evaluating what they are made of, and the hint sets `at` to 0. What an
enclosing construct has in progress (a loop's iterator, a context manager, the exception that is handled, the
way in which a `try` is being left) is a variable of its own, saved like any other.
"""

from __future__ import annotations
import __future__

import ast
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .liveness import DELETED, Names, live_variables
from .nodes import (
    BREAK,
    CONTINUE,
    RAISE,
    RETURN,
    MarkingExits,
    OverIterables,
    Undeclared,
    expression,
    forget_place,
    locate,
)
from .refusing import bound_lines, refuse_what_is_evident
from .source import HintError, Source, where

_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


@dataclass(frozen=True)
class Rewritten:
    """A function that takes its run from the free variable `run`."""

    code: types.CodeType
    run: str
    text: str
    digest: str
    """Of the source that was rewritten, hints and all."""
    saved: dict[int, Names]
    """For each hint, the names that a checkpoint holds: live variables, and what is in progress."""
    described: dict[str, str]
    """What the latter are, for errors."""
    lines: dict[str, int]
    """The last line that gives a variable a value, for errors."""


def rewrite(source: Source) -> Rewritten:
    """Raises HintError for what cannot be entered again."""
    digest, live, lines = source.digest, live_variables(source), bound_lines(source)
    refuse_what_is_evident(source, live)
    rewriter = _Rewriter(source)
    tree = rewriter.function(live)
    saved = {number: live[number] | rewriter.progress[number] for number in live}
    return Rewritten(
        _compiled(source, tree, rewriter.run),
        rewriter.run,
        ast.unparse(tree),
        digest,
        saved,
        rewriter.described,
        lines,
    )


class _Rewriter:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.prefix = "_hint_"
        while any(name.startswith(self.prefix) for name in _identifiers(source.tree)):
            self.prefix = "_" + self.prefix
        self.at, self.run = self.prefix + "at", self.prefix + "run"
        self.progress: dict[int, Names] = {hint.number: frozenset() for hint in source.hints.values()}
        self.described: dict[str, str] = {}
        self._constructs = 0
        self._declared: list[ast.stmt] = []

    def function(self, live: dict[int, Names]) -> ast.FunctionDef:
        tree = self.source.tree
        parameters = {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
        tree.body = [self._over_iterables(each) for each in tree.body]
        body = self.block(tree.body)
        first = [body.pop(0)] if ast.get_docstring(tree, clean=False) is not None else []
        captured = sorted(self.source.function.__code__.co_cellvars)
        cells = f"lambda: ({', '.join(captured)},)" if captured else "None"
        enter = self._statements(f"{self.at} = {self.run}.enter({cells})")
        needed = frozenset().union(*live.values(), *self.progress.values())
        names = sorted({name.removeprefix(DELETED) for name in needed} | parameters)
        state = self.prefix + "state"
        given = [
            f"    if {name!r} in {state}:\n        {name} = {state}[{name!r}]"
            + (f"\n    else:\n        del {name}" if name in parameters else "")
            for name in names
        ]
        restore = self._statements(
            "\n".join(
                [f"if {self.at}:", f"    {state} = {self.run}.variables()", *given, f"    {state} = None"]
            )
        )
        tree.body = [*first, *self._unique(self._declared), *enter, *restore, *body]
        for each in (*enter, *restore):
            locate(each, tree.body[-1] if not first else first[0])
        return ast.fix_missing_locations(tree)

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """What to execute of them: all if at is 0, else what leads to the hint."""
        statements = self._without_declarations(statements)
        with_hints = [each for each in statements if self.source.numbers(each)]
        left = len(with_hints)
        result: list[ast.stmt] = []
        passed: list[ast.stmt] = []
        for each in statements:
            numbers = self.source.numbers(each)
            if not numbers:
                (passed if left and not _is_text(each) else result).append(each)
                continue
            if passed:
                result.append(self._if(f"not {self.at}", passed))
                passed = []
            left -= 1
            new = self.statement(each)
            result += [self._if(self._is_at(numbers, or_zero=True), new)] if len(with_hints) > 1 else new
        return result

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        new = self._rewritten(node)
        for each in new:
            locate(each, node)
        return new

    def _rewritten(self, node: ast.stmt) -> list[ast.stmt]:
        if (hint := self.source.hints.get(node)) is not None:
            return self._statements(
                f"if {self.at}:\n    {self.at} = {self.run}.arrive()\n"
                f"elif {self.run}.due({hint.number}):\n    {self.run}.save({hint.number}, locals())"
            )
        match node:
            case ast.If():
                numbers = self.source.numbers(*node.body)
                test = self._entered(numbers, node.test)
                return [ast.If(test, self.block(node.body), self.block(node.orelse))]
            case ast.While():
                numbers = self.source.numbers(*node.body)
                test = self._entered(numbers, node.test)
                return [ast.While(test, self.block(node.body), self.block(node.orelse))]
            case ast.For():
                return self._for(node)
            case ast.With():
                return self._with(node.items, node.body)
            case ast.Try():
                return self._finally(node) if self.source.numbers(*node.finalbody) else self._try(node)
            case ast.Match():
                return self._match(node)
        raise HintError(
            f"{where(self.source.function, node)} has a hint inside a construct that cannot be resumed "
            f"({type(node).__name__}); put the hint outside."
        )

    def _for(self, node: ast.For) -> list[ast.stmt]:
        inside = self.source.numbers(*node.body)
        iterator, item = self._names("iterator", "item")
        self._keep(inside, iterator)
        self.described[iterator] = f"the iterator of the loop in line {node.lineno}"
        begin = self._statements(f"if not {self.at}:\n    {iterator} = iter(0)")
        begin[0].body[0].value = self._call("iterator", node.iter, line=node.lineno)  # type: ignore[attr-defined]
        again = f"{self.run}.entered({iterator})" if inside else "()"
        if inside and self.source.numbers(*node.orelse):
            again += f" if {self._is_at(inside)} else ()"
        take = self._if(f"not {self.at}", [ast.Assign([node.target], expression(item))])
        loop = ast.For(
            ast.Name(item, ast.Store()),
            expression(f"{iterator} if not {self.at} else {again}"),
            [take, *self.block(node.body)],
            self.block(node.orelse),
        )
        return [*begin, loop, *self._statements(f"{iterator} = {item} = None")]

    def _with(self, items: list[ast.withitem], body: list[ast.stmt]) -> list[ast.stmt]:
        item, *others = items
        inside = self.source.numbers(*body)
        manager, entered = self._names("manager", "entered")
        self._keep(inside, manager)
        self.described[manager] = f"the context manager in line {item.context_expr.lineno}"
        begin = self._statements(f"if not {self.at}:\n    {manager} = 0")
        begin[0].body[0].value = self._call(  # type: ignore[attr-defined]
            "manager", item.context_expr, line=item.context_expr.lineno
        )
        block = self._with(others, body) if others else self.block(body)
        name = None
        if item.optional_vars is not None:
            name = ast.Name(entered, ast.Store())
            take = ast.Assign([item.optional_vars], expression(entered))
            block = [self._if(f"not {self.at}", [take]), *block]
        again = ast.With([ast.withitem(expression(manager), name)], block)
        return [*begin, again, *self._statements(f"{manager} = {entered} = None")]

    def _try(self, node: ast.Try) -> list[ast.stmt]:
        raised: list[ast.stmt] = []
        whole, inside = self.source.numbers(node), self.source.numbers(*node.body)
        for handler in node.handlers:
            if numbers := self.source.numbers(*handler.body):
                (error,) = self._names("error")
                self._keep(numbers, error)
                self.described[error] = f"the exception that is handled in line {handler.lineno}"
                raised += self._statements(f"if {self._is_at(numbers)}:\n    raise {error}")
                self._handler(handler, error)
        body = self.block(node.body) if inside else list(node.body)
        if whole != inside:
            body = [*raised, self._if(self._is_at(inside, or_zero=True), body)]
        return [ast.Try(body, node.handlers, self.block(node.orelse), node.finalbody)]

    def _handler(self, handler: ast.ExceptHandler, error: str) -> None:
        body = self.block(handler.body)
        if (name := handler.name) is not None:
            take = self._if(f"not {self.at}", self._statements(f"{name} = {error}"))
            forget = self._statements(f"{name} = None\ndel {name}")
            body = [take, ast.Try(body, [], [], forget)]
        handler.name, handler.body = error, body

    def _finally(self, node: ast.Try) -> list[ast.stmt]:
        """How the body was left is written down, so that it can be left once more in that way."""
        last = self.source.numbers(*node.finalbody)
        way, value, error, caught = self._names("way", "value", "error", "caught")
        self._keep(last, way, value, error)
        self.described[value] = f"what the try in line {node.lineno} returns"
        self.described[error] = f"the exception that leaves the try in line {node.lineno}"
        inner: list[ast.stmt] = node.body
        if node.handlers or node.orelse:
            inner = [locate(ast.Try(inner, node.handlers, node.orelse, []), node)]
        body = self.block(inner) if self.source.numbers(*inner) else inner
        marking = MarkingExits(way, value)
        body = [new for each in body for new in marking.marked(each)]
        again = f"if {way} == {RETURN}:\n    return {value}\nif {way} == {RAISE}:\n    raise {error}"
        for kind, jump in ((BREAK, "break"), (CONTINUE, "continue")):
            if kind in marking.found:
                again += f"\nif {way} == {kind}:\n    {jump}"
        here = self._is_at(last)
        begin = self._statements(f"if not ({here}):\n    {way} = {value} = {error} = None")
        choice = self._if(here, self._statements(again), [*body, *self._statements(f"{way} = None")])
        note = self._statements(f"{way}, {error} = {RAISE}, {caught}\nraise")
        handler = ast.ExceptHandler(expression("BaseException"), caught, note)
        whole = ast.Try([choice], [handler], [], self.block(node.finalbody))
        return [*begin, whole, *self._statements(f"{value} = {error} = None")]

    def _match(self, node: ast.Match) -> list[ast.stmt]:
        """First which case it is, which binds the names; then what it does."""
        (taken,) = self._names("case")
        chosen: list[ast.stmt] = []
        bodies = [case.body for case in node.cases]
        for number, body in reversed(list(enumerate(bodies, 1))):
            inside = self.source.numbers(*body)  # before what is inside is rewritten
            new = self.block(body) if inside else body
            test = self._entered(inside, expression(f"{taken} == {number}"))
            chosen = [locate(ast.If(test, new, chosen), node)]
        for number, case in enumerate(node.cases, 1):
            case.body = self._statements(f"{taken} = {number}")
        first = self._if(f"not {self.at}", [*self._statements(f"{taken} = 0"), node])
        return [first, *chosen]

    def _entered(self, numbers: tuple[int, ...], test: ast.expr) -> ast.expr:
        """at is one of the numbers, or 0 and the test holds."""
        plain = ast.BoolOp(ast.And(), [expression(f"not {self.at}"), test])
        return ast.BoolOp(ast.Or(), [expression(self._is_at(numbers)), plain]) if numbers else plain

    def _is_at(self, numbers: tuple[int, ...], or_zero: bool = False) -> str:
        known = ([0] if or_zero else []) + list(numbers)
        return f"{self.at} == {known[0]}" if len(known) == 1 else f"{self.at} in {tuple(known)}"

    def _call(self, method: str, argument: ast.expr, line: int) -> ast.expr:
        call = expression(f"{self.run}.{method}(0, {line})")
        assert isinstance(call, ast.Call)
        call.args[0] = argument
        return call

    def _if(self, test: str, body: list[ast.stmt], orelse: Sequence[ast.stmt] = ()) -> ast.stmt:
        return locate(ast.If(expression(test), body, list(orelse)), body[0])

    def _statements(self, text: str) -> list[ast.stmt]:
        found = ast.parse(text).body
        for each in found:
            forget_place(each)
        return found

    def _names(self, *kinds: str) -> list[str]:
        self._constructs += 1
        return [f"{self.prefix}{kind}_{self._constructs}" for kind in kinds]

    def _keep(self, numbers: tuple[int, ...], *names: str) -> None:
        for number in numbers:
            self.progress[number] |= frozenset(names)

    def _without_declarations(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Declarations hold for the whole function, and are gathered at its head."""
        self._declared += [
            inner
            for each in statements
            for inner in _own_statements(each)
            if isinstance(inner, ast.Global | ast.Nonlocal)
        ]
        return [Undeclared().visit(each) for each in statements]

    def _unique(self, declared: list[ast.stmt]) -> list[ast.stmt]:
        kinds: dict[type[ast.stmt], set[str]] = {ast.Global: set(), ast.Nonlocal: set()}
        for each in declared:
            kinds[type(each)].update(each.names)  # type: ignore[attr-defined]
        return [kind(names=sorted(names)) for kind, names in kinds.items() if names]  # type: ignore[call-arg]

    def _over_iterables(self, statement: ast.stmt) -> ast.stmt:
        return OverIterables(self.source, self.run).visit(statement)  # type: ignore[no-any-return]


def _compiled(source: Source, tree: ast.FunctionDef, run: str) -> types.CodeType:
    """Within a function that has the free variables, and the class whose private names it may use."""
    function = source.function
    *_, owner, _ = ["", *function.__qualname__.split(".")]
    module = ast.parse(f"def outer({', '.join([*function.__code__.co_freevars, run])}): pass")
    holder: Any = module.body[0]
    if owner and owner != "<locals>":
        holder.body = ast.parse(f"class {owner}: pass").body
        holder = holder.body[0]
    holder.body = [tree]
    flags = function.__code__.co_flags & _FUTURES
    code = compile(
        ast.fix_missing_locations(module), function.__code__.co_filename, "exec", flags, dont_inherit=True
    )
    found = next(each for each in _codes(code) if each.co_name == tree.name)
    return _renamed(found, found.co_qualname, function.__code__.co_qualname)


def _renamed(code: types.CodeType, before: str, after: str) -> types.CodeType:
    """With the qualified names that it, and what is made inside it, has without the functions around it."""

    def name(known: str) -> str:
        return after + known.removeprefix(before)

    def constant(each: Any) -> Any:
        if isinstance(each, types.CodeType):
            return _renamed(each, before, after)
        inside = each == code.co_qualname and code.co_qualname != before  # a class's body gives its own
        return name(each) if inside else each

    return code.replace(
        co_qualname=name(code.co_qualname), co_consts=tuple(constant(each) for each in code.co_consts)
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in ("id", "name", "arg", "rest", "asname"):
            if isinstance(found := getattr(node, name, None), str):
                yield found


def _own_statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement
        for child in ast.iter_child_nodes(statement):
            for part in child.body if isinstance(child, ast.ExceptHandler | ast.match_case) else [child]:
                if isinstance(part, ast.stmt):
                    yield from _own_statements(part)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
