"""Where places cost differently: closer bounds, and the best path itself if it is short."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from .paths import Found, Line, within

_MOST_PLACES = 200
_MOST_EXTENSIONS = 60_000
_MOST_STOPS = 200
_WORTH_WHILE = 1e-4
_ROUNDING = 1e-13

_Label = tuple[float, float, "tuple[int, object] | None"]
"""Spent, lost, and the stops in reverse as (last, those before)."""


def closed(line: Line, allowed: float, found: Found) -> Found:
    """`found`, with its gap closed where the line is short enough; else perhaps with a smaller one."""
    if line.end <= _MOST_PLACES + 1 and found.path.loss > found.bound:
        stops = _search(line, allowed, found)
        if stops is not None:
            best = line.path(stops) if stops else found.path
            return Found(best, best.loss, found.price)
    if found.path.loss > found.bound * (1 + _WORTH_WHILE):
        return _bounded_by_number(line, allowed, found)
    return found


def _bounded_by_number(line: Line, allowed: float, found: Found) -> Found:
    """No path has more stops than the cheapest places that can be paid together, and so none is better than
    the best one with so many. That says more than a price does where stops are few.
    """
    most = sum(1 for spent in accumulate(sorted(line.costs)) if spent <= allowed * (1 + _ROUNDING))
    if most > _MOST_STOPS:
        return found
    alike = replace(line, costs=[1.0] * len(line.costs))
    loosest = within(alike, float(most), alike.path(found.path.stops))
    path = line.path(loosest.path.stops)
    if path.spent > allowed or path.loss > found.path.loss:
        path = found.path
    return Found(path, min(max(found.bound, loosest.bound), path.loss), found.price)


def _search(line: Line, allowed: float, found: Found) -> tuple[int, ...] | None:
    """Stops of a path that is better, none if there is none, and None where it would take too long.

    Paths from the beginning, each kept only while none is both cheaper and better, and only if what it must
    at least lose from there on (at the price that `found` has) leaves it better than the best path known.
    """
    block, at, costs, end = line.curve.loss, line.at, line.costs, line.end
    ahead, price = _least_ahead(line, found.price), found.price
    best = found.path.loss
    stops: tuple[int, ...] = ()
    labels: list[list[_Label]] = [[] for _ in line.at]
    labels[0].append((0.0, 0.0, None))
    extensions = 0
    for place in range(end):
        for spent, lost, before in _undominated(labels[place]):
            extensions += end - place
            if extensions > _MOST_EXTENSIONS:
                return None
            for to in range(place + 1, end):
                cost = spent + costs[to - 1]
                loss = lost + block(at[to] - at[place])
                must = loss + ahead[to] - price * (allowed - cost) - _ROUNDING * (loss + ahead[to])
                if must < best and cost <= allowed:
                    labels[to].append((cost, loss, (to, before)))
            whole = lost + block(at[end] - at[place])
            if whole < best and line.spent(reached := _stops(before)) <= allowed:
                best, stops = whole, reached
    return stops


def _least_ahead(line: Line, price: float) -> list[float]:
    """From each place on: the least loss + price × cost of what is still to come."""
    block, at, costs, end = line.curve.loss, line.at, line.costs, line.end
    ahead = [0.0] * (end + 1)
    for place in range(end - 1, -1, -1):
        ahead[place] = min(
            block(at[to] - at[place]) + ahead[to] + (price * costs[to - 1] if to < end else 0.0)
            for to in range(place + 1, end + 1)
        )
    return ahead


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


def _stops(chain: object) -> tuple[int, ...]:
    found = []
    while isinstance(chain, tuple):
        found.append(chain[0])
        chain = chain[1]
    return tuple(reversed(found))
