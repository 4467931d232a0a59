"""deploy/prometheus: every expression is Prometheus' language, of metrics and labels that proxyd serves."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import Metric
from training_run import ROOT

from understudy.recovery.daemon.metrics import Metrics

RULES = ROOT / "deploy" / "prometheus" / "understudy.rules.yaml"
FOLDER = RULES.parent
LABELS = "_labelnames"
"""Of what prometheus_client serves; no collector tells it in another way while it has no samples."""
OF_PROMETHEUS = {"job", "instance", "exported_job"}
"""Labels of the target, and ours of the same name beside it (honor_labels is off)."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    assert isinstance(group["rules"], list)
    return group["rules"]


def served() -> dict[str, set[str]]:
    """Every series that a proxyd can serve -> its labels, asked of the very object that serves them."""

    async def families() -> list[tuple[Metric, set[str]]]:
        metrics = Metrics({})
        counters = [one for one in metrics.registry._collector_to_names if one is not metrics]
        found = [(family, set(vars(one)[LABELS])) for one in counters for family in one.collect()]
        return found + [(family, set(vars(family)[LABELS])) for family in await metrics._look()]

    names: dict[str, set[str]] = {}
    for family, labels in asyncio.run(families()):
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        for ending in endings:
            names[family.name + ending] = labels | ({"le"} if ending == "_bucket" else set())
    return names


def selectors(expression: Any) -> list[Any]:
    """Every vector selector in an expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        return [expression]
    inner = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vs", "vector_selector")]
    inner += list(getattr(expression, "args", None) or [])
    return [
        found for one in inner if one is not None and not isinstance(one, str) for found in selectors(one)
    ]


def test_the_metrics_that_are_served_are_all_found() -> None:
    names = served()
    assert names["understudy_recoveries_total"] == {
        "job", "rank", "device", "fault", "plan", "recovered",
    }  # fmt: skip
    assert names["understudy_step"] == {"job", "rank", "device"}
    assert names["understudy_recovery_seconds_bucket"] == {"part", "le"}
    assert len(names) > 25


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_is_served(rule: dict[str, Any]) -> None:
    names = served()
    asked = selectors(promql_parser.parse(rule["expr"]))
    assert len(asked) == len(re.findall(r"understudy_\w+|\bup\b", rule["expr"]))
    labels: set[str] = set()
    for selector in asked:
        if selector.name != "up":
            assert selector.name in names, f"{selector.name} is not served"
            used = {matcher.name for matcher in selector.matchers.matchers}
            assert used <= names[selector.name] | OF_PROMETHEUS
            labels |= names[selector.name]
    for group in re.findall(r"by \(([^)]*)\)", rule["expr"]):
        assert set(group.replace(" ", "").split(",")) <= labels | OF_PROMETHEUS
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert named <= labels | OF_PROMETHEUS
    assert rule["labels"]["severity"] in ("page", "ticket")
    page, heading = rule["annotations"]["runbook_url"].split("#")
    text = (ROOT / page).read_text()
    assert heading in {line[3:].lower().replace(" ", "-") for line in text.splitlines() if line[:3] == "## "}
    assert f"| `{rule['alert']}` |" in text
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


def test_what_is_not_served_would_be_noticed() -> None:
    (selector,) = selectors(promql_parser.parse("increase(understudy_recoverys_total[5m]) > 0"))
    assert selector.name not in served()


def test_the_rules_go_by_the_name_of_the_scrape_job() -> None:
    (job,) = yaml.safe_load((FOLDER / "scrape.yaml").read_text())["scrape_configs"]
    assert job["job_name"] == "understudy"
    assert 'job="understudy"' in RULES.read_text()
