"""A search that is killed and goes on: `python examples/resumable_search.py DIRECTORY`, again and again.

Monte Carlo tree search for the longest way of a knight over a small board, without a field twice. With
`--die-at N` the process kills itself at its Nth rollout, as a power cut would; called again, it goes on
behind its newest checkpoint, and finds the way that it would have found without.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import signal

from understudy.hints import checkpoint, checkpoints

SIZE = 5
JUMPS = [(1, 2), (2, 1), (-1, 2), (-2, 1), (1, -2), (2, -1), (-1, -2), (-2, -1)]
Field = tuple[int, int]


class Node:
    """A way so far: its last field, and what came of going on from there."""

    def __init__(self, field: Field, parent: Node | None) -> None:
        self.field, self.parent = field, parent
        self.children: list[Node] = []
        self.visits, self.total, self.best = 0, 0.0, 0

    def way(self) -> list[Field]:
        return [*(self.parent.way() if self.parent else []), self.field]

    def promise(self) -> float:
        if not self.visits or self.parent is None:
            return math.inf
        return self.total / self.visits / SIZE**2 + 0.4 * math.sqrt(
            math.log(self.parent.visits) / self.visits
        )


def jumps(way: list[Field]) -> list[Field]:
    """The fields that can be gone to next."""
    x, y = way[-1]
    fields = [(x + dx, y + dy) for dx, dy in JUMPS]
    return [(a, b) for a, b in fields if 0 <= a < SIZE and 0 <= b < SIZE and (a, b) not in way]


def search(rollouts: int, seed: int) -> list[Field]:
    """The longest way that was found."""
    draws = random.Random(seed)
    root = Node((0, 0), None)
    longest: list[Field] = []
    for number in range(rollouts):
        node = root
        while node.children:  # selection
            node = max(node.children, key=Node.promise)
        way = node.way()
        if node.visits:  # expansion
            node.children = [Node(field, node) for field in jumps(way)]
            if node.children:
                node = draws.choice(node.children)
                way = node.way()
        while fields := jumps(way):  # simulation
            way.append(draws.choice(fields))
        if len(way) > len(longest):
            longest = way
        above: Node | None = node
        while above is not None:  # backpropagation
            above.visits += 1
            above.total += len(way)
            above = above.parent
        checkpoint()
        if number + 1 == DIE_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    return longest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("directory", help="where its checkpoints lie")
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--die-at", type=int, default=0, help="the rollout behind which it kills itself")
    parser.add_argument("--every", type=int, help="checkpoint each so-manieth rollout, whatever it costs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    DIE_AT = arguments.die_at
    resumable = checkpoints(directory=arguments.directory, overhead=0.1, every=arguments.every)(search)
    found = resumable(arguments.rollouts, arguments.seed)
    print(f"{len(found)} fields:", " ".join(f"{'abcde'[x]}{y + 1}" for x, y in found))
