"""Parts of the pages that measurements write."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Its lines; all columns but the first are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
