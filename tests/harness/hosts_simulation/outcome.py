"""What came of one seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Of one schedule."""

    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    """Line by line, what happened."""
