"""Writing a report: one HTML file that asks no network, its numbers as JSON, its pictures as PNG."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.campaigns.report.blocks import Picture, Section, as_markdown
from understudy.campaigns.report.matrix import BASELINE, Matrix
from understudy.campaigns.report.results import Key, read
from understudy.campaigns.report.sections.aggregates import aggregates, knobs
from understudy.campaigns.report.sections.correctness import correctness
from understudy.campaigns.report.sections.goodput import gains, goodput
from understudy.campaigns.report.sections.prices import prices
from understudy.campaigns.report.sections.recoveries import recoveries
from understudy.campaigns.report.sections.snapshots import snapshots
from understudy.campaigns.report.sections.surroundings import failures, gates, peers, summary, surroundings
from understudy.campaigns.report.sections.wall import split, timelines
from understudy.campaigns.report.statistics import Estimate
from understudy.campaigns.results.records import Run
from understudy.recovery.base.errors import BadInput

HTML, JSON, FIGURES, SNAPSHOTS = "report.html", "report.json", "figures", "snapshots"
"""Names below a campaign's folder; the last is where files of bench/snapshots may lie."""
TEMPLATE = "page.html.j2"
NEEDS = ("jinja2", "matplotlib", "scipy")


@dataclass(frozen=True)
class Report:
    """What is shown, and what it is made of."""

    matrix: Matrix
    sections: Sequence[Section]


def report_of(folder: Path, snapshots_folder: Path | None = None) -> Report:
    """Raises BadInput where there is no campaign, or what a report needs is not installed."""
    _installed()
    matrix = Matrix.of(read(folder))
    beside = folder / SNAPSHOTS
    storage = snapshots_folder or (beside if beside.is_dir() else None)
    made = (
        summary(matrix), gates(matrix), goodput(matrix), gains(matrix), aggregates(matrix), prices(matrix),
        split(matrix), timelines(matrix), correctness(matrix), recoveries(matrix), knobs(matrix), peers(matrix),
        snapshots(storage), surroundings(matrix),
    )  # fmt: skip
    return Report(matrix, tuple(section for section in made if section is not None))


@dataclass(frozen=True)
class Written:
    """`failures`: each offence against a gate, as a sentence."""

    page: Path
    files: tuple[Path, ...]
    failures: tuple[str, ...]


def write(folder: Path, snapshots_folder: Path | None = None) -> Written:
    """All of it, below the campaign's folder. Raises BadInput, OSError."""
    report = report_of(folder, snapshots_folder)
    drawn = {picture.name: picture.draw() for section in report.sections for picture in section.pictures}
    (folder / FIGURES).mkdir(exist_ok=True)
    for earlier in (folder / FIGURES).glob("*.png"):
        if earlier.stem not in drawn:
            earlier.unlink()
    contents = {folder / FIGURES / f"{name}.png": content for name, content in drawn.items()}
    contents[folder / JSON] = (json.dumps(as_json(report), indent=1, allow_nan=False) + "\n").encode()
    contents[folder / HTML] = as_html(report, drawn).encode()
    for path, content in contents.items():
        _replace(path, content)
    return Written(folder / HTML, tuple(contents), tuple(failures(report.matrix)))


def markdown(folder: Path, snapshots_folder: Path | None = None) -> str:
    """Tables and sentences, for a page of documentation. Raises BadInput."""
    report = report_of(folder, snapshots_folder)
    plan = report.matrix.results.plan
    campaign = plan.campaign
    head = (
        "# Ways to recover, compared\n\n"
        f"Written by `make campaign` ([how](../campaigns/README.md)); not to be edited. Campaign {campaign.name}, commit {plan.commit}, {plan.began}, "
        f"{plan.machine.cores} × {plan.machine.cpu}, kernel {plan.machine.kernel}, PyTorch {plan.machine.torch}, Python {plan.machine.python}; "
        f"seeds {', '.join(map(str, campaign.seeds))}.\n\n"
    )
    return head + as_markdown(report.sections)


def as_html(report: Report, drawn: Mapping[str, bytes]) -> str:
    """Self-contained: pictures are in it. All text is escaped by the template."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pictures = {name: base64.b64encode(content).decode() for name, content in drawn.items()}
    plan = report.matrix.results.plan
    return environment.get_template(TEMPLATE).render(plan=plan, sections=report.sections, pictures=pictures)


def as_json(report: Report) -> dict[str, Any]:
    """For programs: every number, unrounded; None where there is none."""
    matrix = report.matrix
    plan = matrix.results.plan
    return _finite(
        {
            "campaign": plan.campaign.model_dump(mode="json"),
            "digest": plan.digest,
            "commit": plan.commit,
            "machine": plan.machine.model_dump(mode="json"),
            "began": plan.began,
            "gates": [_verdict(matrix, name) for name in matrix.verdicts],
            "counted": [suite.name for suite in matrix.counted],
            "gains": list(_gains(matrix)),
            "runs": [_run(key, run) for key, run in matrix.every_run()],
            "unplanned": list(matrix.results.unplanned),
            "tables": [
                {"section": section.title, "title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note}
                for section in report.sections
                for table in section.tables
            ],
            "pictures": [_picture(picture) for section in report.sections for picture in section.pictures],
        }
    )  # fmt: skip


def _verdict(matrix: Matrix, name: str) -> dict[str, Any]:
    verdict = matrix.verdicts[name]
    return {
        "suite": name,
        "passed": verdict.passed,
        "offences": [
            {"gate": one.gate.value, **one.key._asdict(), "sentence": f"{one.sentence}."}
            for one in verdict.offences
        ],
        "excuses": [{**one.key._asdict(), "status": one.status, "why": one.why} for one in verdict.excuses],
    }


def _gains(matrix: Matrix) -> Iterable[dict[str, Any]]:
    """Percent of goodput: against blocking, and against the undisturbed reference."""
    from understudy.campaigns.report.statistics import estimate

    for suite in matrix.disturbed:
        for variant in matrix.variants(suite.name):
            if variant != BASELINE:
                yield _estimate(suite.name, variant, BASELINE, matrix.gain(suite, variant))
            yield _estimate(suite.name, variant, "undisturbed", estimate(matrix.drops(suite, variant)))
    for variant in matrix.results.variants:
        overall = matrix.overall(lambda suite, name=variant: matrix.gains(suite, name, BASELINE))  # type: ignore[misc]
        yield _estimate(None, variant, BASELINE, overall)
        drop = matrix.overall(lambda suite, name=variant: matrix.drops(suite, name))  # type: ignore[misc]
        yield _estimate(None, variant, "undisturbed", drop)


def _estimate(suite: str | None, variant: str, against: str, one: Estimate) -> dict[str, Any]:
    return {
        "suite": suite, "variant": variant, "against": against, "percent": one.mean, "low": one.low, "high": one.high,
        "n": one.n, "shows_a_difference": one.shows_a_difference,
    }  # fmt: skip


def _run(key: Key, run: Run | None) -> dict[str, Any]:
    if run is None:
        return {**key._asdict(), "status": "unread"}
    return run.model_dump(mode="json", exclude={"timeline"}) | {
        "training_seconds": run.training_seconds,
        "goodput": run.goodput,
    }


def _picture(picture: Picture) -> dict[str, str]:
    return {"file": f"{FIGURES}/{picture.name}.png", "title": picture.title}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


def _replace(path: Path, content: bytes) -> None:
    """All of it or, if this is stopped, what was there before."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


def _installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise BadInput(
            f"a report needs {', '.join(missing)}, which the extra torch-understudy[campaign] brings, and make setup "
            "in a checkout"
        )
