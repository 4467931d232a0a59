"""Which variables may be read behind a hint: data flow over the syntax tree (paper 000 §3, §4.2.1).

"May": where a path cannot be told, it is taken. Any statement inside a `try` may raise, any context manager
may swallow; what functions inside the function have captured may be read at any time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .source import Source

Names = frozenset[str]
DELETED = "del "
"""Before a name: it is not read, but it is deleted, which asks that it has a value."""
_NONE: Names = frozenset()
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class _Exits:
    """What is read behind each way out of a block, other than its end."""

    broken: Names = _NONE
    continued: Names = _NONE
    returned: Names = _NONE
    raised: Names = _NONE

    def inside_loop(self, broken: Names, continued: Names) -> _Exits:
        return _Exits(broken, continued, self.returned, self.raised)

    def raising(self, raised: Names) -> _Exits:
        return _Exits(self.broken, self.continued, self.returned, self.raised | raised)


def live_variables(source: Source) -> dict[int, Names]:
    """For each hint, by its number, the function's own variables that may be read behind it."""
    flow = _Flow(source)
    flow.block(source.tree.body, _NONE, _Exits())
    kept = source.locals
    kept |= {DELETED + name for name in kept}
    return {number: (names | source.captured) & kept for number, names in flow.live.items()}


def reads(node: ast.AST | None) -> Names:
    """The names that an expression or a simple statement reads when it is evaluated."""
    return frozenset(_reads(node)) if node is not None else _NONE


def writes(node: ast.AST | None) -> Names:
    """The names that a target, a pattern or a simple statement binds or deletes in any case."""
    return frozenset(_writes(node)) if node is not None else _NONE


class _Flow:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.live: dict[int, Names] = {hint.number: _NONE for hint in source.hints.values()}

    def block(self, statements: Iterable[ast.stmt], after: Names, exits: _Exits) -> Names:
        for statement in reversed(list(statements)):
            after = self.statement(statement, after, exits)
        return after

    def statement(self, node: ast.stmt, after: Names, exits: _Exits) -> Names:
        if (hint := self.source.hints.get(node)) is not None:
            self.live[hint.number] |= after | exits.raised
            return after | exits.raised
        match node:
            case ast.Break():
                return exits.broken
            case ast.Continue():
                return exits.continued
            case ast.Return():
                return reads(node.value) | exits.returned | exits.raised
            case ast.Raise():
                return reads(node.exc) | reads(node.cause) | exits.raised
            case ast.If():
                before = self.block(node.body, after, exits) | self.block(node.orelse, after, exits)
                return reads(node.test) | before | exits.raised
            case ast.While():
                return self._while(node, after, exits)
            case ast.For():
                return self._for(node, after, exits)
            case ast.With():
                return self._with(node, after, exits)
            case ast.Try() | ast.TryStar():
                return self._try(node, after, exits)
            case ast.Match():
                return self._match(node, after, exits)
            case _:
                return reads(node) | _without(after, writes(node)) | exits.raised

    def _while(self, node: ast.While, after: Names, exits: _Exits) -> Names:
        test = reads(node.test) | exits.raised
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        ended = _NONE if endless else self.block(node.orelse, after, exits)
        head = test | ended
        while (found := head | self.block(node.body, head, exits.inside_loop(after, head))) != head:
            head = found
        return head

    def _for(self, node: ast.For, after: Names, exits: _Exits) -> Names:
        ended = self.block(node.orelse, after, exits)
        bound, target = writes(node.target), reads(node.target)
        head = ended | exits.raised
        while True:
            body = self.block(node.body, head, exits.inside_loop(after, head))
            found = head | target | _without(body, bound)
            if found == head:
                return reads(node.iter) | head
            head = found

    def _with(self, node: ast.With, after: Names, exits: _Exits) -> Names:
        before = self.block(node.body, after, exits.raising(after))
        for item in reversed(node.items):
            bound = writes(item.optional_vars)
            before = (
                reads(item.context_expr) | reads(item.optional_vars) | _without(before, bound) | exits.raised
            )
        return before

    def _try(self, node: ast.Try | ast.TryStar, after: Names, exits: _Exits) -> Names:
        outer = exits
        if node.finalbody:
            ways = (after, exits.broken, exits.continued, exits.returned, exits.raised)
            after, *others = (self.block(node.finalbody, way, exits) for way in ways)
            outer = _Exits(*others)
        types = frozenset().union(*(reads(handler.type) for handler in node.handlers))
        caught = types
        for handler in node.handlers:
            before = self.block(handler.body, after, outer)
            caught |= _without(before, frozenset({handler.name}) if handler.name else _NONE)
            for number in self.source.numbers(*handler.body):  # what a resumption evaluates once more
                self.live[number] |= types
        ended = self.block(node.orelse, after, outer)
        return self.block(node.body, ended, outer.raising(caught)) | caught | outer.raised

    def _match(self, node: ast.Match, after: Names, exits: _Exits) -> Names:
        before = after | exits.raised
        for case in node.cases:
            inside = reads(case.guard) | self.block(case.body, after, exits)
            before |= reads(case.pattern) | _without(inside, writes(case.pattern))
        return reads(node.subject) | before


def _without(names: Names, bound: Names) -> Names:
    return names - bound - {DELETED + name for name in bound}


def _reads(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name():
            if isinstance(node.ctx, ast.Load):
                yield node.id
            elif isinstance(node.ctx, ast.Del):
                yield DELETED + node.id
        case ast.AugAssign():
            if isinstance(node.target, ast.Name):
                yield node.target.id
            yield from _reads(node.target)
            yield from _reads(node.value)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            # What its body reads is captured, and counts as read at any time.
            for part in (*getattr(node, "decorator_list", ()), node.args, getattr(node, "returns", None)):
                if part is not None:
                    yield from _reads(part)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            own = frozenset(name for each in node.generators for name in _writes(each.target))
            yield from _reads(node.generators[0].iter)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            for number, each in enumerate(node.generators):
                parts += [*each.ifs, each.target] + ([each.iter] if number else [])
            yield from (name for part in parts for name in _reads(part) if name not in own)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _reads(child)


def _writes(node: ast.AST) -> Iterator[str]:
    """Of what is bound in any case; an assignment expression may not be reached."""
    match node:
        case ast.Name():
            if isinstance(node.ctx, ast.Store | ast.Del):
                yield node.id
        case ast.Tuple() | ast.List():
            for element in node.elts:
                yield from _writes(element)
        case ast.Starred():
            yield from _writes(node.value)
        case ast.Assign() | ast.Delete():
            for target in node.targets:
                yield from _writes(target)
        case ast.AnnAssign():
            if node.value is not None:
                yield from _writes(node.target)
        case ast.AugAssign():
            yield from _writes(node.target)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0]
        case ast.pattern():
            for each in ast.walk(node):
                name = getattr(each, "rest", None) if isinstance(each, ast.MatchMapping) else None
                if isinstance(each, ast.MatchAs | ast.MatchStar):
                    name = each.name
                if name:
                    yield name
