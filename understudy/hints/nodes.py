"""Changes to a function's own nodes, and nodes that are made from texts."""

from __future__ import annotations

import ast
import builtins

from .source import Source

ITERATES = {"enumerate": 0, "zip": 0, "iter": 0, "map": 1, "filter": 1}
"""Builtins whose iterators hold those of their arguments; from which argument on."""
RETURN, BREAK, CONTINUE, RAISE = 1, 2, 3, 4
"""The ways in which a block may be left, other than at its end."""


def expression(text: str) -> ast.expr:
    found = ast.parse(text, mode="eval").body
    forget_place(found)
    return found


def forget_place(node: ast.AST, but: ast.AST | None = None) -> None:
    """Of what was parsed from a template; `but` is the user's, and keeps its lines."""
    if node is not but:
        for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            if hasattr(node, name):
                delattr(node, name)
        for child in ast.iter_child_nodes(node):
            forget_place(child, but)


def locate(node: ast.stmt, like: ast.stmt) -> ast.stmt:
    """A new statement says that it is on the line of the one that it stands for."""
    if not hasattr(node, "lineno"):
        ast.copy_location(node, like)
    return ast.fix_missing_locations(node)


class _Own(ast.NodeTransformer):
    """Changes what belongs to the function itself, not to functions and classes inside it."""

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _leave


class Undeclared(_Own):
    def visit_Global(self, node: ast.Global) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)


class OverIterables(_Own):
    """`zip(d, e)` becomes `zip(run.over(d), run.over(e))`, whose positions can be saved."""

    def __init__(self, source: Source, run: str) -> None:
        self.source, self.run = source, run

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ITERATES:
            found = self.source.resolve(node.func)
            if found is getattr(builtins, node.func.id) and (node.func.id != "iter" or len(node.args) == 1):
                first = ITERATES[node.func.id]
                node.args[first:] = [self._over(each) for each in node.args[first:]]
        return node

    def _over(self, argument: ast.expr) -> ast.expr:
        if isinstance(argument, ast.Starred):
            return argument
        call = ast.Call(expression(f"{self.run}.over"), [argument], [])
        return ast.fix_missing_locations(ast.copy_location(call, argument))


class MarkingExits(_Own):
    """Before a block is left by return, break or continue, it is written down."""

    def __init__(self, way: str, value: str) -> None:
        self.way, self.value = way, value
        self.found: set[int] = set()
        self._loops = 0

    def marked(self, statement: ast.stmt) -> list[ast.stmt]:
        new = self.visit(statement)
        return new if isinstance(new, list) else [new]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        new = ast.parse(f"{self.value} = 0\n{self.way} = {RETURN}\nreturn {self.value}").body
        new[0].value = node.value or ast.Constant(None)  # type: ignore[attr-defined]
        for each in new:
            forget_place(each, node.value)
        return [locate(each, node) for each in new]

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> ast.AST:
        self._loops += 1
        node.body = [new for each in node.body for new in self.marked(each)]
        self._loops -= 1
        node.orelse = [new for each in node.orelse for new in self.marked(each)]
        return node

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        return self._jump(node, BREAK)

    def visit_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        return self._jump(node, CONTINUE)

    def _jump(self, node: ast.stmt, kind: int) -> list[ast.stmt]:
        if self._loops:
            return [node]
        self.found.add(kind)
        (note,) = ast.parse(f"{self.way} = {kind}").body
        forget_place(note)
        return [locate(note, node), node]
