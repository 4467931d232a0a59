"""Random functions with hints, for `test_hints_random_programs`: small, deterministic, and full of odd control flow.

A program is the text of a module with a function `program(given)`. What it uses is bound before, but for `maybe`,
which some branches bind and others delete; numbers stay small, and loops are short.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

HEAD = """
import collections
import contextlib
import functools
import itertools
import random

import numpy
import torch

from understudy.hints import checkpoint

LOG = []
total = 0


class Box:
    made = 0

    def __init__(self, value, other=None):
        self.value, self.other = value, other

    def __repr__(self):
        return f"Box({self.value})"

    def grow(self, by):
        self.value = (self.value + by) % 1009
        Box.made += 1
        return self.value


def noted(value):
    LOG.append(value)
    return len(LOG)


def raising(value):
    if value % 3 == 0:
        raise ValueError(value)
    if value % 3 == 1:
        raise KeyError(value)
    return value


def program(given):
    global total
    a, b, c, i, j, k = 1, 2, 3, 4, 5, 6
    xs, ys, table = [1, 2], given["list"], {"p": 1}
    rows = [xs, xs]
    own = random.Random(a)
    tensor = torch.zeros(4)
    view = tensor[1:3]
    array = numpy.zeros(4)
    part = array[::2]
    box = Box(a)
    box.other = box
    kept = [box, ys]
    numbers = iter([3, 1, 4, 1, 5, 9])
    queue, counts, seldom = collections.deque([1, 2], maxlen=4), collections.Counter("ab"), collections.defaultdict(list)
    weight = torch.ones(2, requires_grad=True)
    generator = numpy.random.default_rng(4)
    failed = None

    def add(n):
        nonlocal a
        a = (a + n) % 1009
        return a

    def maker(start):
        def step(by=1):
            nonlocal start
            start = (start + by + b) % 1009
            return start

        return step

    if given is None:
        maybe = 0
    step = maker(c)
    steps = [step, add]
"""
TAIL = """
    seen = [xs, ys, rows[0] is xs, table, kept[0] is box, kept[1] is given["list"], box.other is box, box.value]
    drawn = [own.random(), random.random(), float(torch.rand(1)), numpy.random.random()]
    same = [steps[0] is step, view.data_ptr() == tensor[1:].data_ptr(), list(numbers), step(2), add(1)]
    more = [queue, counts, dict(seldom), weight.grad is not None and weight.grad.tolist(), generator.random()]
    more += [repr(failed), repr(failed and failed.__context__), [each.__qualname__ for each in steps[:2]]]
    return a, b, c, i, j, k, seen, drawn, same, more, tensor.tolist(), view.tolist(), array.tolist(), part.tolist(), total, Box.made
"""
NUMBERS = ("a", "b", "c", "i", "j", "k")
WEIGHTY = ("try", "loop", "while", "if")


@dataclass
class Maker:
    """Writes one program."""

    draw: random.Random
    hints: float
    """Behind which part of statements there is one."""
    lines: list[str] = field(default_factory=list)
    level: int = 1
    depth: int = 0
    loops: int = 0
    handling: bool = False
    """Whether an exception is, under the name of `error`."""
    count: int = 0
    """Of names that are made up."""

    def line(self, text: str) -> None:
        self.lines.append("    " * self.level + text)

    def block(self, statements: int) -> None:
        self.level += 1
        self.depth += 1
        for _ in range(statements):
            self.statement()
        if self.draw.random() < 0.3:
            self.line("checkpoint()")
        else:
            self.line(f"LOG.append(({self.count}, {self.number()}))")
        self.level -= 1
        self.depth -= 1

    def statement(self) -> None:
        compound = [self.if_, self.loop, self.while_, self.try_, self.with_, self.match_, self.function]
        simple = [
            self.assign, self.assign, self.change, self.alias, self.comprehend, self.random_, self.tensors, self.call,
            self.maybe, self.global_, self.iterate,
        ]  # fmt: skip
        nested = self.depth < 3 and self.draw.random() < 0.45
        kinds: list[Callable[[], None]] = compound if nested else simple
        if self.depth and self.draw.random() < 0.12:
            kinds = [self.leave]
        self.draw.choice(kinds)()
        if self.draw.random() < self.hints:
            self.line("checkpoint()")

    def name(self) -> str:
        return self.draw.choice(NUMBERS)

    def number(self) -> str:
        first, second = self.name(), self.name()
        return self.draw.choice([
            first, str(self.draw.randrange(9)), f"({first} + {second}) % 97", f"({first} * 3 - {second}) % 89",
            "len(xs)", "box.value", f"sum(xs) % 83 + {first}", "table['p'] % 101", "add(1)", "step()", "total % 79",
            f"(lambda q={first}: q + {second})()", f"max({first}, {second})",
        ])  # fmt: skip

    def test(self) -> str:
        return self.draw.choice([
            f"{self.number()} % 2", f"{self.name()} > {self.name()}", f"(k := {self.number()}) % 3",
            "len(xs) > 3", "not ys", f"own.random() < 0.{self.draw.randrange(1, 9)}",
        ])  # fmt: skip

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    # simple statements

    def assign(self) -> None:
        self.line(self.draw.choice([
            f"{self.name()} = {self.number()}", f"{self.name()} = ({self.name()} + {self.number()}) % 1009",
            "a, b = b, a", f"b, *_, c = {self.number()}, 0, {self.number()}", f"i = j = {self.number()}",
            "c += 1", f"box.value = {self.number()}", f"queue.append({self.number()})", "queue.rotate(1)",
            f"counts[{self.name()} % 3] += 1", f"seldom[{self.name()} % 2].append({self.name()})", "del counts['a']",
            f"c = {self.number()} if {self.test()} else {self.number()}", f"assert {self.name()} >= 0",
        ]))  # fmt: skip

    def change(self) -> None:
        self.line(self.draw.choice([
            f"xs.append({self.number()})", f"ys.extend([{self.number()}, {self.number()}])", "del xs[3:]", "del ys[5:]",
            f"table[{self.name()} % 4] = {self.number()}", "table['p'] = (table['p'] + 1) % 97",
            f"rows[1][0] = {self.number()}", f"table.setdefault('q', []).append({self.number()})", "xs[-1:] = [1, 2]",
        ]))  # fmt: skip

    def alias(self) -> None:
        self.line(self.draw.choice([
            "rows = [xs, rows[0], ys][:2]", "rows = [xs, xs]", "kept[1] = ys", "other = xs; other.append(1); del other",
            "box.other = box", "steps[0] = step", "table['box'] = box",
        ]))  # fmt: skip

    def comprehend(self) -> None:
        self.line(self.draw.choice([
            f"xs[:] = [x % 50 + {self.name()} for x in xs if x % 3]", "c = sum(x for x in xs) % 211",
            "table = {**table, **{str(x): x for x in xs[:2]}}", "i = len({x % 5 for x in ys})",
            "j = sum(x * y for x in xs[:2] for y in (a, b)) % 311", "xs[:2] = sorted(map(lambda x: x + c, xs[:2]))",
            "[(k := x) for x in xs[:2]]", "j = functools.reduce(lambda x, y: (x + y) % 97, xs, a)",
            "b = [(lambda: x + a)() for x in xs[:2]][-1:] == [c]",
        ]))  # fmt: skip

    def random_(self) -> None:
        self.line(self.draw.choice([
            "a = own.randrange(50)", "b = random.randrange(50)", "xs.append(int(numpy.random.randint(9)))",
            "i = int(generator.integers(9))", "xs.append(int(generator.permutation(4)[0]))",
            "c = int(torch.randint(0, 9, (1,)))", "own.shuffle(xs)", "random.shuffle(ys)",
        ]))  # fmt: skip

    def tensors(self) -> None:
        self.line(self.draw.choice([
            "view += torch.rand(2)", "tensor[0] += a", "part += b", "array[1] = numpy.random.random()",
            "tensor = tensor.clone(); view = tensor[1:3]", "view.mul_(0.5)", "weight.data.add_(view)",
            "with torch.enable_grad(): (weight * weight).sum().backward()", "weight.grad = None",
        ]))  # fmt: skip

    def call(self) -> None:
        self.line(self.draw.choice([
            "add(c)", "box.grow(a)", "noted(b)", f"j = steps[{self.draw.randrange(2)}](1)", "step(by=2)",
            "steps.append(lambda q=1: (q + i) % 7)", "steps.append(box.grow)", "steps.append(functools.partial(add, 2))",
            "j = (steps[2:] or [add])[-1](2)", "steps.append(lambda q=a: q + c)", "k = steps[-1]()" if self.draw.random() < 0.1 else "noted(k)",
        ]))  # fmt: skip

    def maybe(self) -> None:
        kind = self.draw.randrange(3)
        if kind == 0:
            self.line(f"maybe = {self.number()}")
        elif kind == 1:
            self.line("maybe = 0")
            self.line("del maybe")
        else:
            self.line("try:")
            self.line("    LOG.append(maybe)")
            self.line("except UnboundLocalError:")
            self.line("    LOG.append('unbound')")

    def global_(self) -> None:
        self.line(
            self.draw.choice(["total += 1", f"total = (total + {self.number()}) % 501", "Box.made += 1"])
        )

    def iterate(self) -> None:
        self.line(self.draw.choice([
            "b = next(numbers, 0)", "numbers = iter(xs[:4])", "numbers = enumerate(ys[:3])", "numbers = zip(xs[:2], ys[:2])",
            "numbers = itertools.chain(xs[:2], queue)", "numbers = itertools.islice(itertools.count(3), 3)",
            "numbers = itertools.accumulate(xs[:3])", "numbers = reversed(ys[:3])", "numbers = map(add, [1, 2])", "numbers = iter({**table}.items())",
        ]) if self.draw.random() < 0.6 else "LOG.append(next(numbers, None))")  # fmt: skip

    def leave(self) -> None:
        jumps = ["return a, 'early', xs"] if self.draw.random() < 0.2 else []
        jumps += ["raise ValueError(a)", "raising(b)"] if self.draw.random() < 0.5 else []
        jumps += ["break", "continue"] if self.loops else []
        jumps += (
            ["raise", "raise KeyError(c) from error", "raise TypeError(str(error))"] if self.handling else []
        )
        if jumps:
            self.line(f"if {self.test()}:")
            self.line(f"    {self.draw.choice(jumps)}")
        else:
            self.assign()

    # compound statements

    def if_(self) -> None:
        self.line(f"if {self.test()}:")
        self.block(self.draw.randint(1, 2))
        if self.draw.random() < 0.3:
            self.line(f"elif {self.test()}:")
            self.block(1)
        if self.draw.random() < 0.5:
            self.line("else:")
            self.block(self.draw.randint(1, 2))

    def loop(self) -> None:
        most = self.draw.randint(1, 3)
        target, source = self.draw.choice([
            ("i", f"range({most})"), ("j", f"list(xs[:{most}])"), ("i, j", f"enumerate(ys[:{most}])"),
            ("(i, b)", f"zip(range({most}), ys)"), ("k", f"map(lambda q: q + c, range({most}))"),
            ("_", f"list(table.items())[:{most}]"), ("i", f"reversed(range({most}))"), ("j", "(1, a)"),
            ("i", f"iter(range({most}))"), ("_", "numbers"), ("_", "table"), ("_", "table.items()"), ("_", "given"), ("k", f"filter(lambda q: q % 2, range({2 * most}))"), ("box.value", f"range({most})"),
            ("_", f"dict(zip('pqr'[:{most}], range(9))).items()"), ("j", "sorted({1, 2})"), ("xs[0]", f"range({most})"),
        ])  # fmt: skip
        if target == "xs[0]":
            self.line("xs.append(0)")
        self.line(f"for {target} in {source}:")
        self.inside_loop()

    def while_(self) -> None:
        name = self.fresh()
        self.line(f"{name} = {self.draw.randint(1, 3)}")
        self.line(f"while {name}{' and ' + self.test() if self.draw.random() < 0.3 else ''}:")
        self.line(f"    {name} -= 1")
        self.inside_loop()

    def inside_loop(self) -> None:
        self.loops += 1
        self.block(self.draw.randint(1, 3))
        self.loops -= 1
        if self.draw.random() < 0.3:
            self.line("else:")
            self.block(1)

    def try_(self) -> None:
        kinds = self.draw.sample(
            ["ValueError", "(KeyError, IndexError)", "LookupError", "Exception"], self.draw.randint(0, 2)
        )
        kinds.sort(key=lambda kind: kind == "Exception")
        last = not kinds or self.draw.random() < 0.5
        self.line("try:")
        self.block(self.draw.randint(1, 3))
        for kind in kinds:
            name = self.draw.choice([" as error", ""])
            self.line(f"except {kind}{name}:")
            if name:
                self.line("    LOG.append((type(error).__name__, str(error)))")
                self.line("    failed = error")
            before, self.handling = self.handling, bool(name)
            self.block(self.draw.randint(1, 2))
            self.handling = before
        if kinds and self.draw.random() < 0.4:
            self.line("else:")
            self.block(1)
        if last:
            self.line("finally:")
            loops, self.loops = self.loops, 0 if self.draw.random() < 0.7 else self.loops
            self.block(self.draw.randint(1, 2))
            self.loops = loops

    def with_(self) -> None:
        self.line(self.draw.choice([
            "with contextlib.suppress(ValueError, KeyError):", "with contextlib.nullcontext(a) as k:",
            "with torch.no_grad():", "with contextlib.nullcontext(), contextlib.suppress(ValueError):",
        ]))  # fmt: skip
        self.block(self.draw.randint(1, 3))

    def match_(self) -> None:
        self.line(
            self.draw.choice(
                ["match a % 3:", "match (b % 2, c % 2):", "match xs:", "match table:", "match box:"]
            )
        )
        self.level += 1
        for case in self.draw.sample(
            ["0", "(0, k)", "[first, *rest]", "{'p': k}", "int(k) if k > 1", "Box(value=k)"],
            self.draw.randint(1, 3),
        ):
            self.line(f"case {case}:")
            self.block(1)
        self.line("case _:")
        self.block(1)
        self.level -= 1

    def function(self) -> None:
        name = self.fresh()
        self.line(f"def {name}(q, *more, r={self.number()}):")
        self.line("    nonlocal c")
        self.line(f"    c = (c + q + r + {self.draw.choice('bik')}) % 1009")
        self.line(f"    return c if q % 2 else {self.draw.choice(['len(xs)', 'a', 'box.grow(q)'])}")
        self.line(f"steps.append({name})")
        self.line("checkpoint()")
        self.line(f"xs.append({name}({self.number()}))")


def program(seed: int) -> str:
    """The text of a module."""
    draw = random.Random(seed)
    maker = Maker(draw, draw.choice([0.15, 0.3, 0.5]))
    for _ in range(draw.randint(3, 7)):
        maker.statement()
    maker.line("checkpoint()")
    return HEAD + "\n".join(maker.lines) + TAIL
