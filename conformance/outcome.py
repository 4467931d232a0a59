"""What a sweep found out: per unit (an entry with one dtype), as it is written to JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STATUSES = ("identical", "different", "flaky", "unsupported")


@dataclass
class UnitResult:
    database: str
    entry: str
    dtype: str
    dense: dict[str, dict[str, int]] = field(default_factory=dict)
    """Variant -> status -> number of samples."""
    sparse: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same for samples with a sparse argument."""
    not_identical: list[dict[str, Any]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Cases whose error arrived at a later synchronisation."""
    syncs: dict[str, int] = field(default_factory=dict)
    """Variant -> most synchronisations of a repeated call."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Crashes, hangs, entries without samples."""
    seconds: float = 0.0
    commit: str = ""
    """What was checked out when it ran."""

    def add(self, verdict: dict[str, Any]) -> None:
        variant, status = verdict["variant"], verdict["status"]
        counts = (self.sparse if verdict["sparse"] else self.dense).setdefault(variant, {})
        counts[status] = counts.get(status, 0) + 1
        if status != "identical":
            kept = {name: verdict[name] for name in ("variant", "index", "status", "sparse", "differences")}
            self.not_identical.append(kept)
        if verdict["raised_late"]:
            self.late.append(f"{variant} {verdict['index']}")
        if verdict["syncs"] is not None:
            self.syncs[variant] = max(self.syncs.get(variant, 0), verdict["syncs"])

    def count(self, status: str, *, variant: str = "", sparse: bool = False) -> int:
        counted = self.sparse if sparse else self.dense
        return sum(by.get(status, 0) for name, by in counted.items() if not variant or name == variant)
