"""From results to docs/conformance.md and the lines a sweep ends with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import reasons
from outcome import STATUSES, UnitResult
from reasons import Reason

PREFACE = Path(__file__).with_name("preface.md")


@dataclass
class Differing:
    """All cases of one entry and variant that differ, with the reason for them."""

    entry: str
    variant: str
    sparse: bool
    reason: Reason | None
    dtypes: dict[str, int] = field(default_factory=dict)
    example: str = ""


@dataclass
class Summary:
    differing: list[Differing]
    dead_reasons: list[Reason]
    errors: list[str]


def summarise(results: list[UnitResult], *, whole: bool) -> Summary:
    """`whole`: all entries were run, so that a reason that covers nothing is dead."""
    found: dict[tuple[str, str, bool, Reason | None], Differing] = {}
    errors = []
    for result in results:
        name = f"{result.database}/{result.entry}"
        for case in result.not_identical:
            if case["status"] != "different":
                continue
            reason = reasons.reason_for(name, result.dtype, case["variant"])
            key = (name, case["variant"], case["sparse"], reason)
            entry = found.setdefault(key, Differing(name, case["variant"], case["sparse"], reason))
            entry.dtypes[result.dtype] = entry.dtypes.get(result.dtype, 0) + 1
            if not entry.example:
                first = case["differences"][0]
                entry.example = f"{first['what']} {first['where']}: {first['detail']}"
        for finding in result.findings:
            place = " ".join(str(finding.get(key, "")) for key in ("variant", "index", "side")).strip()
            if finding.get("side") != "native":
                errors.append(f"{finding['kind']}: {name} {result.dtype} {place}: {finding['detail']}")
    differing = sorted(found.values(), key=lambda d: (d.entry, d.variant, d.sparse))
    for each in differing:
        if each.reason is None:
            count = sum(each.dtypes.values())
            errors.append(f"no reason: {each.entry} {each.variant} ({count}): {each.example}")
    used = {id(each.reason) for each in differing}
    dead = [reason for reason in reasons.REASONS if whole and id(reason) not in used]
    errors += [f"dead reason: {reason.entry} {reason.variant} no longer differs" for reason in dead]
    return Summary(differing, dead, errors)


def text(results: list[UnitResult], summary: Summary, seconds: float) -> str:
    lines = [*summary.errors, ""]
    for database, group in _by(results, lambda r: r.database).items():
        lines.append(f"{database}: {_totals(group, sparse=False)}; sparse: {_totals(group, sparse=True)}")
    lines.append(f"{len(results)} units in {seconds:.0f} s; {len(summary.errors)} errors")
    return "\n".join(lines) + "\n"


def markdown(results: list[UnitResult], summary: Summary) -> str:
    parts = [
        PREFACE.read_text(),
        f"\nLast run: {_commits(results)}.\n",
        "\n## Totals\n\n",
        _total_table(results),
    ]
    parts += ["\n## By dtype (dense)\n\n", _dtype_table(results)]
    parts += ["\n## By variant (dense)\n\n", _variant_table(results)]
    parts += ["\n## What differs, and why\n\n", _differing_table(summary)]
    parts += ["\n## Crashes, hangs, entries without samples\n\n", _finding_list(results)]
    parts += ["\n## Flaky natively\n\n", _list_entries(r for r in results if r.count("flaky"))]
    parts += ["\n## Only metadata is compared\n\n", _no_bits_table()]
    parts += ["\n## What waits for the device\n\n", _sync_section(results)]
    parts += ["\n## Errors that arrive late\n\n", _list_entries(r for r in results if r.late)]
    return "".join(parts)


def _commits(results: list[UnitResult]) -> str:
    """What was run at which commit; a part of a sweep may be newer than the rest of it."""
    parts = [
        f"{len(group):,} units (an entry with one dtype) at commit {name}"
        for name, group in sorted(_by(results, lambda r: r.commit).items(), key=lambda item: -len(item[1]))
    ]
    return "; ".join(parts)


def _by(results: Iterable[UnitResult], key: Callable[[UnitResult], str]) -> dict[str, list[UnitResult]]:
    groups: dict[str, list[UnitResult]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
    return dict(groups)


def _numbers(results: Iterable[UnitResult], *, variant: str = "", sparse: bool = False) -> dict[str, int]:
    """Samples per status; flaky and unsupported ones are not among `samples`."""
    group = list(results)
    numbers = {
        status: sum(r.count(status, variant=variant, sparse=sparse) for r in group) for status in STATUSES
    }
    numbers["samples"] = numbers["identical"] + numbers["different"]
    return numbers


def _percent(numbers: dict[str, int]) -> str:
    if not numbers["samples"]:
        return "–"
    share = 100 * numbers["identical"] / numbers["samples"]
    # Never rounded up to 100: that would hide what differs.
    return "100 %" if numbers["identical"] == numbers["samples"] else f"{min(share, 99.999):.3f} %"


def _totals(results: Iterable[UnitResult], *, sparse: bool) -> str:
    numbers = _numbers(results, sparse=sparse)
    return (
        f"{numbers['identical']} of {numbers['samples']} identical ({_percent(numbers)}), "
        f"{numbers['flaky']} flaky, {numbers['unsupported']} not compared"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([_cell(value) for value in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _total_table(results: list[UnitResult]) -> str:
    rows = []
    for database, group in _by(results, lambda r: r.database).items():
        entries = {result.entry for result in group}
        clean = entries - {
            r.entry for r in group if r.count("different") or r.count("different", sparse=True)
        }
        for sparse in (False, True):
            n = _numbers(group, sparse=sparse)
            if sum(n.values()):
                kind = "sparse" if sparse else "dense"
                row = [database, kind, len(entries), len(clean), n["samples"], n["identical"], _percent(n)]
                rows.append([*row, n["different"], n["flaky"], n["unsupported"]])
    head = ("database", "samples", "entries", "without difference", "compared", "identical", "share")
    return _table([*head, "different", "flaky natively", "not compared"], rows)


def _dtype_table(results: list[UnitResult]) -> str:
    rows = []
    for database, group in _by(results, lambda r: r.database).items():
        for dtype, part in sorted(_by(group, lambda r: r.dtype).items()):
            n = _numbers(part)
            rows.append([database, dtype, n["samples"], n["identical"], _percent(n), n["different"]])
    return _table(("database", "dtype", "compared", "identical", "share", "different"), rows)


def _variant_table(results: list[UnitResult]) -> str:
    rows = []
    for database, group in _by(results, lambda r: r.database).items():
        for variant in sorted({name for r in group for name in r.dense}):
            n = _numbers(group, variant=variant)
            rows.append([database, variant, n["samples"], n["identical"], _percent(n), n["different"]])
    return _table(("database", "variant", "compared", "identical", "share", "different"), rows)


def _differing_table(summary: Summary) -> str:
    if not summary.differing:
        return "Nothing.\n"
    rows = []
    for each in summary.differing:
        dtypes = ", ".join(f"{dtype} {count}" for dtype, count in sorted(each.dtypes.items()))
        variant = f"{each.variant} (sparse)" if each.sparse else each.variant
        why = each.reason.text if each.reason else f"**no reason yet**: {each.example[:300]}"
        rows.append([each.entry, variant, dtypes, why])
    return _table(("entry", "variant", "samples", "reason"), rows)


def _finding_list(results: list[UnitResult]) -> str:
    lines = [
        f"- {result.database}/{result.entry} {result.dtype}: "
        + " ".join(str(finding.get(key, "")) for key in ("kind", "variant", "index", "side", "detail"))
        for result in results
        for finding in result.findings
    ]
    return "\n".join(lines or ["None."]) + "\n"


def _list_entries(results: Iterable[UnitResult]) -> str:
    names = sorted({f"{result.database}/{result.entry}" for result in results})
    return (", ".join(names) or "None.") + "\n"


def _no_bits_table() -> str:
    rows = sorted(reasons.NO_DEFINED_BITS.items())
    kept = sorted(reasons.KEPT_ON_CPU.items())
    return (
        _table(("entry of op_db", "why"), rows)
        + "\nArguments that stay on the CPU:\n\n"
        + _table(("entry of op_db", "why"), kept)
    )


def _sync_section(results: list[UnitResult]) -> str:
    counted: dict[str, dict[str, int]] = defaultdict(dict)
    for result in results:
        for variant, syncs in result.syncs.items():
            counted[f"{result.database}/{result.entry}"][variant] = syncs
    waiting = {name: by for name, by in counted.items() if any(by.values())}
    rows = []
    for name, by in sorted(waiting.items()):
        rows.append([name, ", ".join(f"{variant} {syncs}" for variant, syncs in sorted(by.items()) if syncs)])
    return (
        f"{len(waiting)} of {len(counted)} entries wait for the device at least once when the same sample "
        "runs again (operators whose answer the worker needs, and copies to the host; up to four samples per "
        "variant, first dtype). The numbers are the most waits of one call.\n\n"
    ) + _table(("entry", "waits"), rows)
