"""Ten functions with hints, each of another kind of code that a resumption might get wrong.

They are plain here; tests decorate them. Each is a pure function of its arguments and of the generators'
states, but for `pipeline`, which reads and writes in a folder, and returns what it has written.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy
import torch

from understudy.hints import checkpoint

LOG: list[Any] = []
TOTALS: dict[str, int] = {}
rounds = 0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def training(epochs: int) -> Any:
    """Dropout, batch norm, AdamW with a schedule, gradients that are accumulated across a hint."""
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
    loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    losses = []
    for epoch in range(epochs):
        for number, (x, y) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            checkpoint()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(data.tensors[0]).sum().item() + epoch)
            checkpoint()
        model.train()
    return losses, [each.detach() for each in model.state_dict().values()], loss.item()


class Node:
    def __init__(self, state: int, parent: Node | None) -> None:
        self.state, self.parent = state, parent
        self.children: list[Node] = []
        self.visits, self.value = 0, 0.0

    def score(self) -> float:
        assert self.parent is not None
        return self.value / (self.visits + 1) + math.sqrt(
            math.log(self.parent.visits + 1) / (self.visits + 1)
        )


def tree_search(rollouts: int) -> Any:
    """Selection, expansion, simulation, backpropagation: a tree whose nodes know their parents."""
    root = node = Node(1, None)
    draws = random.Random(7)
    found: Counter[int] = Counter()
    for _ in range(rollouts):
        node = root
        while node.children:
            node = max(node.children, key=Node.score)
        for move in (2, 3, 5):
            node.children.append(Node(node.state * move % 97, node))
        checkpoint()
        node = draws.choice(node.children)
        reward = (node.state + random.random()) / 97
        found[node.state] += 1
        while node is not None:
            node.visits += 1
            node.value += reward
            node = node.parent  # type: ignore[assignment]
            if node is root:
                checkpoint()
    order = []
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        order.append((node.state, node.visits, node.value))
        waiting.extend(node.children)
    return order, found.most_common()


def k_means(clusters: int) -> Any:
    """NumPy's generators, views of arrays, comprehensions, a loop that ends by convergence."""
    own = numpy.random.default_rng(3)
    points = numpy.concatenate([own.normal(centre, 0.6, (15, 2)) for centre in range(clusters)])
    centres = points[numpy.random.permutation(len(points))[:clusters]].copy()
    first = centres[0]
    history = []
    while True:
        near = ((points[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
        checkpoint()
        before = centres.copy()
        for number in range(clusters):
            chosen = points[near == number]
            if not len(chosen):
                centres[number] = points[own.integers(len(points))]
                continue
            centres[number] = chosen.mean(0) + numpy.random.normal(0, 1e-3)
        history.append([float(x) for x in first])
        checkpoint()
        if abs(before - centres).max() < 5e-3 or len(history) > 6:
            break
    return history, centres, near


def pipeline(folder: Path) -> Any:
    """Files that are read, and written, while it is cut."""
    words: dict[str, int] = {}
    with open(folder / "in.txt", encoding="utf-8") as source, open(folder / "out.txt", "w") as target:
        title = source.readline()
        for number, line in enumerate(source):
            for word in line.split():
                words[word] = words.get(word, 0) + 1
            target.write(f"{number} {len(words)} {random.random()}\n")
            checkpoint()
            if number % 3 == 2:
                target.write(f"{sorted(words)[:2]}\n")
    numbers = open(folder / "numbers.bin", "wb")  # noqa: SIM115 - no with: the file is a variable like others
    for word in words:
        numbers.write(bytes([words[word]]))
        checkpoint()
    numbers.close()
    checkpoint()
    return title, words, [(folder / name).read_bytes() for name in ("out.txt", "numbers.bin")]


def nested_loops(most: int) -> Any:
    """Breaks and continues of both loops, else clauses, a loop over an iterator that is shared."""
    found, i = [], 0
    for i in range(most):
        if i == 1:
            continue
        for j in range(i, 100):
            if j % 4 == 3:
                continue
            if i * j > 20:
                checkpoint()
                break
            found.append((i, j))
            if j % 5 == 0:
                checkpoint()
            if (i + j) % 7 == 6:
                break
        else:
            found.append(("never", i))  # type: ignore[arg-type]
        if i == most - 2:
            break
    else:
        checkpoint()
        found.append("complete")  # type: ignore[arg-type]
    left = iter([1, 2, 3, 4, 5, 6])
    for a in left:
        for b in left:
            found.append((a, b))
            checkpoint()
            if b % 3 == 0:
                break
        else:
            checkpoint()
    k = 10
    while k:
        k -= 1
        if k % 2:
            continue
        checkpoint()
        if k == 2:
            break
    else:
        found.append("none")  # type: ignore[arg-type]
    return found, i, k, list(left)


def exceptions(most: int) -> Any:
    """Hints in all parts of try, with returns, breaks and exceptions on their way."""
    trace: list[Any] = []

    def left(kind: int) -> Any:
        trace.append(("called", kind))
        if kind == 3:
            raise LookupError("three")
        return kind

    for kind in range(most):
        try:
            trace.append(("try", left(kind)))
            checkpoint()
            if kind == 1:
                raise ValueError("one") from KeyError("inner")
            if kind == 2:
                continue
            if kind == 4:
                int("four")
        except ValueError as error:
            checkpoint()
            trace.append((type(error).__name__, str(error), repr(error.__cause__)))
            try:
                raise TypeError("second")
            except TypeError as second:
                checkpoint()
                trace.append((str(second), str(second.__context__)))
        except LookupError:
            checkpoint()
            trace.append("lookup")
        else:
            checkpoint()
            trace.append("else")
        finally:
            trace.append(("finally", kind))
            checkpoint()
        trace.append(("behind", kind))
    try:
        try:
            for kind in range(3):
                try:
                    if kind == 1:
                        return (trace, "returned", len(trace))
                finally:
                    checkpoint()
                    trace.append(("leaving", kind))
        finally:
            checkpoint()
            trace.append("outer")
    finally:
        trace.append("outermost")


def propagating(most: int) -> Any:
    """An exception that leaves the function through hints."""
    for number in range(most):
        try:
            if number == 2:
                raise ArithmeticError(number)
        finally:
            checkpoint()


def closures(most: int) -> Any:
    """Functions that share variables with the one that is cut, and are kept in its data."""
    total = 0
    kept = []

    def add(n: int) -> int:
        nonlocal total
        total += n
        return total

    def power(base: int, n: int) -> int:
        return 1 if n == 0 else base * power(base, n - 1)

    def counter(start: int) -> Any:
        def step(by: int = 2, *, offset: int = 1) -> int:
            nonlocal start
            start += by + offset
            return start

        return step

    step = counter(10)
    for i in range(most):
        kept.append(lambda x, i=i: x + i + total)
        add(power(2, i))
        checkpoint()
        add(step())
        other = add
    checkpoint()
    other(1000)
    return total, [f(1) for f in kept], step(by=1), other is add


def aliasing(given: dict[str, Any]) -> Any:
    """Names of one object, views of one memory, globals, an argument that the caller goes on using."""
    global rounds
    rows = [[0] * 3] * 2
    row = rows[1]
    whole = torch.zeros(6)
    part = whole[2:4]
    array = numpy.zeros((3, 3))
    diagonal = array.reshape(-1)[::4]
    LOG.clear()
    log = LOG
    rounds = 0
    while rounds < given["rounds"]:
        row[rounds % 3] += 1
        part += torch.rand(2)
        diagonal += rounds
        given["seen"].append(rounds)
        given["tensor"].add_(1)
        checkpoint()
        LOG.append((rounds, rows[0] is row))
        _note("round")
        rounds += 1
        checkpoint()
    rows[0][0] = 99
    return rows, whole, array, list(LOG), log is LOG, dict(TOTALS), rounds, given["seen"] is given["also"]


def _note(what: str) -> None:
    TOTALS[what] = TOTALS.get(what, 0) + len(LOG)


def matching(most: int) -> Any:
    """match with captures and guards, while with else."""
    found: list[Any] = []
    things: list[Any] = [1, (2, 3), {"x": 4, "y": 5}, [6, 7, 8], "text", None, (9, -9)]
    n = 0
    while n < most:
        thing = things[n % len(things)]
        match thing:
            case int(value) if value > 0:
                checkpoint()
                found.append(("int", value))
            case (a, b) if a + b:
                found.append((a, b))
                checkpoint()
                found.append(a - b)
            case {"x": x, **rest}:
                for key in rest:
                    checkpoint()
                    found.append((x, key, rest))
            case [head, *tail]:
                found.append(("list", head))
                match head, tail:
                    case int(), [first, *_]:
                        for each in tail:
                            match each % 2:
                                case 0:
                                    checkpoint()
                                case _:
                                    checkpoint()
                                    found.append(first)
                found.append(tail)
            case str() as text:
                found.append(text)
            case _:
                checkpoint()
        n += 1
        if n == 100:
            break
    else:
        checkpoint()
        found.append("else")
    return found


def iterators(most: int) -> Any:
    """map, zip, enumerate, filter, views of dictionaries, and iterators under names of their own."""
    table = {f"k{n}": n for n in range(most)}
    found: list[Any] = []
    scale = 3
    numbers = count(5)
    squares = map(lambda x: x * x * scale, range(most))
    for number, (key, value) in enumerate(table.items()):
        table[key] = value + number
        checkpoint()
        found.append((key, value, next(numbers)))
    for a, b in zip(table.values(), filter(lambda x: x % 2 == 0, range(100)), strict=False):
        scale += 1
        checkpoint()
        found.append((a, b, next(squares)))
        if b == 4:
            break
    for each in reversed(found[:3]):
        found.append(each)
        checkpoint()
    for each in chain([1, 2], {5}, "ab"):
        checkpoint()
        found.append((each, [x * y for x in range(2) for y in (each, 1)], {z for z in (1,)}))  # type: ignore[operator]
    for left in table.keys() & {"k1"}:
        checkpoint()
        found.append((left, sum(x for x in range(scale))))
    return found, list(squares), next(numbers)


def argument() -> dict[str, Any]:
    """What `aliasing` is called with."""
    seen: list[int] = []
    return {"rounds": 4, "seen": seen, "also": seen, "tensor": torch.ones(2)}
