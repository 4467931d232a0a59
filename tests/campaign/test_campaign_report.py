"""The report of a campaign: what may be said of a few seeds, and a page that renders without a network."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest
from made_up_runs import STEPS, MadeUp, campaign

from understudy.campaigns.report import markdown, write
from understudy.campaigns.report.blocks import Section, Table, as_markdown
from understudy.campaigns.report.matrix import Matrix
from understudy.campaigns.report.page import FIGURES, Written, as_json, report_of
from understudy.campaigns.report.results import Key, read
from understudy.campaigns.report.sections.surroundings import failures
from understudy.campaigns.report.sections.wall import columns
from understudy.campaigns.report.statistics import (
    NO_DIFFERENCE,
    NOTHING,
    differences,
    estimate,
    gains,
    over_suites,
)
from understudy.campaigns.results.records import PARTS, Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
LONGEST_S = 60
HOSTILE = "<script>alert(1)</script> | $\\frac{$ \x07"
SUITE = "gpt-fixed"


# ---------------------------------------------------------------- what may be said
def test_gains_are_of_pairs_that_both_have() -> None:
    ours, theirs = {1: 11.0, 2: 9.0, 3: 7.0}, {1: 10.0, 2: 10.0, 4: 1.0, 5: 0.0}
    assert gains(ours, theirs) == pytest.approx([10.0, -10.0])
    assert gains({5: 1.0}, theirs) == []
    assert differences(ours, theirs) == [1.0, -1.0]


def test_an_interval_of_three_seeds_reaches_from_the_least_to_the_most() -> None:
    # One resample in 27 is thrice the least: 3.7 %, and a 95 % interval leaves 2.5 % out.
    one = estimate([1.0, 2.0, 6.0])
    assert (one.mean, one.n, one.low, one.high) == (3.0, 3, 1.0, 6.0)
    assert one.shows_a_difference
    assert one.text() == "+3.0 % (+1.0 to +6.0 %)"


def test_an_interval_of_many_is_near_that_of_the_normal_distribution() -> None:
    values = [float(number % 10) for number in range(200)]  # mean 4.5, standard deviation 2.87
    one = estimate(values)
    half = 1.96 * math.sqrt(8.25 / 200)
    assert one.low == pytest.approx(4.5 - half, abs=0.05)
    assert one.high == pytest.approx(4.5 + half, abs=0.05)


@pytest.mark.parametrize("values", [[-1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
def test_an_interval_with_zero_inside_shows_no_difference(values: list[float]) -> None:
    one = estimate(values)
    assert not one.shows_a_difference
    assert one.text().startswith(NO_DIFFERENCE)
    assert "%" in one.text() and f"{fmean(values):+.1f} % (" not in one.text()


def test_one_seed_has_no_interval_and_shows_no_difference() -> None:
    one = estimate([2.0])
    assert (one.mean, one.n, one.low, one.high) == (2.0, 1, None, None)
    assert not one.shows_a_difference
    assert one.text() == "+2.0 % (once: no interval)"
    assert NOTHING.text() == "–"


def test_equal_differences_have_an_interval_of_no_width() -> None:
    assert estimate([1.5, 1.5, 1.5]).text("s") == "+1.5 s (+1.5 to +1.5 s)"


def test_the_same_differences_have_the_same_interval_each_time() -> None:
    values = [0.3, 1.7, 2.9, 4.1, 5.3]
    first = estimate(values)
    from understudy.campaigns.report import statistics

    statistics._interval.cache_clear()
    assert estimate(values) == first


def test_over_suites_each_counts_once_whatever_its_number_of_seeds() -> None:
    one = over_suites({"a": [1.0, 3.0], "b": [5.0], "c": [], "d": [5.0, 5.0, 5.0]})
    assert (one.n, one.mean) == (3, 4.0)
    assert over_suites({"a": [1.0, 3.0], "b": []}) == estimate([1.0, 3.0])


def test_a_difference_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        estimate([1.0, math.nan])


# ---------------------------------------------------------------- made-up runs, checked by hand
def test_the_json_has_the_numbers_of_the_runs(tmp_path: Path) -> None:
    made = MadeUp.complete()
    found = json.loads(json.dumps(as_json(report_of(made.write(tmp_path)))))
    estimates = {(one["suite"], one["variant"], one["against"]): one for one in found["gains"]}

    def goodput(suite: str, variant: str, seed: int) -> float:
        run = made.runs[Key(suite, variant, seed)]
        return float(run["steps"] / (run["wall"] - run["starting"] - run["ending"]))

    by_hand = [100 * (goodput(SUITE, "jit", s) / goodput(SUITE, "blocking", s) - 1) for s in (1, 2, 3)]
    gain = estimates[SUITE, "jit", "blocking"]
    assert gain["percent"] == pytest.approx(fmean(by_hand), rel=1e-12)
    assert (gain["low"], gain["high"]) == pytest.approx((min(by_hand), max(by_hand)), rel=1e-12)
    calm = "sources-gpt-undisturbed"
    drops = [100 * (goodput(SUITE, "jit", s) / goodput(calm, "bare", s) - 1) for s in (1, 2, 3)]
    drop = estimates[SUITE, "jit", "undisturbed"]
    assert drop["percent"] == pytest.approx(fmean(drops), rel=1e-12)
    assert len(found["runs"]) == len(made.planned)
    assert found["commit"] == "abc1234" and found["counted"] == [SUITE, "convnet-records"]


def test_the_price_of_checkpoints_and_that_of_restarts_are_two_numbers(tmp_path: Path) -> None:
    text = markdown(MadeUp.complete(campaign(seeds=(1,))).write(tmp_path))
    made = read(tmp_path)

    def goodput(suite: str, variant: str) -> float:
        return made.runs[Key(suite, variant, 1)].goodput

    calm = "sources-gpt-undisturbed"
    protection = 100 * (goodput(calm, "blocking") / goodput(calm, "bare") - 1)
    faults = 100 * (goodput(SUITE, "blocking") / goodput(calm, "blocking") - 1)
    assert f"| sources-gpt | – | {protection:+.1f} % (once: no interval) |" in text
    assert re.search(rf"\| {SUITE} \| [^|]+ \| {re.escape(f'{faults:+.1f} % (once: no interval)')} \|", text)


def test_a_failed_suite_is_shown_failed_with_its_gate_and_its_run(tmp_path: Path) -> None:
    made = MadeUp.complete()
    made.spoil(SUITE, "overlapped", 2, steps=STEPS - 1)
    said = f"overlapped with seed 2 came to step {STEPS - 1} of {STEPS}"
    sentence = f"{SUITE}: {said} (target steps in every variant)."
    text = markdown(made.write(tmp_path))
    assert f"- {sentence}" in text
    assert f"| {SUITE} (failed) |" in text
    report = report_of(tmp_path)
    assert failures(report.matrix) == [sentence]
    assert as_json(report)["counted"] == ["convnet-records"]


def test_timelines_are_cut_around_each_fault(tmp_path: Path) -> None:
    matrix = Matrix.of(read(MadeUp.complete().write(tmp_path)))
    found = columns(matrix, matrix.results.suites[SUITE])
    assert found is not None
    _, drawn = found
    assert [title for title, *_ in drawn] == ["step 12: kill of rank 0", "step 30: kill of rank 0"]
    for _, since, until, strips in drawn:
        for strip in strips:
            assert all(since <= a < b <= until for _, a, b in strip.parts)
            assert min(map(abs, strip.faults)) < 1e-9
            behind = next(name for name, a, _ in strip.parts if a >= -1e-9)
            assert behind == "detect"


def test_a_recovery_of_the_proxy_stands_in_the_timeline_where_nobody_saw_its_fault(tmp_path: Path) -> None:
    made = MadeUp.complete()
    for seed in (1, 2, 3):
        run = made.runs[Key(SUITE, "transparent", seed)]
        inside = [span for span in run["timeline"] if span["what"] == "detect"]
        run["timeline"] = [span for span in run["timeline"] if span["what"] == "compute"]
        run["timeline"] += [
            {"what": "restart-copy-replay", "since": one["since"], "until": one["since"] + 0.25}
            for one in inside
        ]
        for fault in run["faults"]:
            fault["at"] = None
    matrix = Matrix.of(read(made.write(tmp_path)))
    found = columns(matrix, matrix.results.suites[SUITE])
    assert found is not None
    (strip,) = (one for one in found[1][0][3] if one.label == "transparent")
    assert any(name == "recovered by the proxy" and abs(a) < 1e-9 for name, a, _ in strip.parts)


def test_a_campaign_of_which_nothing_came_still_has_a_page(tmp_path: Path) -> None:
    made = MadeUp.complete(campaign(seeds=(1,)))
    made.runs.clear()
    written = write(made.write(tmp_path))
    assert len(written.failures) == 4  # one for each suite
    (failure,) = (one for one in written.failures if one.startswith(SUITE))
    assert failure.startswith(f"{SUITE}: each of 6 runs has no run.json (artifacts readable): ")
    assert failure in written.page.read_text()


# ---------------------------------------------------------------- snapshots
def test_snapshots_are_read_where_they_are_and_said_to_be_missing_where_not(tmp_path: Path) -> None:
    folder = MadeUp.complete(campaign(seeds=(1,))).write(tmp_path)
    beside = folder / "snapshots"
    beside.mkdir()
    row = {"way": "understudy", "interval": 10, "slowdown": 1.234, "from_interval": None, "turns": []}
    swept = {"varied": "threads", "value": 2, "interval": 10, "slowdown": 1.1, "durable": 4}
    results = {"title": "of a machine", "state_bytes": 116e6, "rows": [row], "sweep": [swept], "more": 1}
    (beside / "slowdown.json").write_text(json.dumps(results))
    (beside / "goodput.json").write_text('{"measured": true')
    text = markdown(folder)
    assert "| understudy | 1.234 |" in text and "| threads | 2 | 10 | 1.100 |" in text
    assert "slowdown.json: of a machine; state of 116 MB." in text
    assert "The counterpart of Figure 9 is missing: goodput.json cannot be read" in text
    assert "The counterpart of Figure 11 is missing: there is no snapshots.json" in text
    assert "Figure 10 (Intel Optane memory) has no counterpart" in text


# ---------------------------------------------------------------- the page
class Addresses(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [
            (tag, value or "") for name, value in attrs if name in ("src", "href", "srcset", "data")
        ]


def hostile() -> MadeUp:
    """Names and reasons as an attacker would have them."""
    made = MadeUp.complete(campaign(seeds=(1,)))
    made.runs[Key(SUITE, "torchft", 1)]["why"] = HOSTILE
    made.runs[Key(SUITE, "blocking", 1)] |= {"left_behind": [HOSTILE], "training": HOSTILE}
    run = made.runs[Key("convnet-records", "transparent", 1)]
    for fault in run["faults"]:
        fault["kind"] = HOSTILE
    for recovery in run["recoveries"]:
        recovery["plan"] = HOSTILE
    run["timeline"].append({"what": HOSTILE, "since": 0.0, "until": 1.0})
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = hostile().write(tmp_path_factory.mktemp("hostile"))
    (folder / FIGURES).mkdir()
    (folder / FIGURES / "timeline-99.png").write_bytes(b"of an earlier report")
    return write(folder)


@pytest.fixture
def page(written: Written) -> Path:
    return written.page


def test_what_is_written_is_all_there_and_of_an_earlier_report_nothing(written: Written) -> None:
    folder = written.page.parent
    found = json.loads((folder / "report.json").read_text())
    pictures = {folder / one["file"] for one in found["pictures"]}
    assert set((folder / FIGURES).iterdir()) == pictures and len(pictures) > 5
    assert set(written.files) == {*pictures, folder / "report.json", written.page}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert not list(folder.rglob("*.part"))
    (failure,) = written.failures
    assert failure.startswith(f"{SUITE}: blocking with seed 1 left <script>")


def test_the_page_fetches_nothing_and_runs_nothing(page: Path) -> None:
    content = page.read_text()
    parsed = Addresses()
    parsed.feed(content)
    assert parsed.found and all(value.startswith(("data:", "#")) for _, value in parsed.found), parsed.found
    assert not parsed.tags & {"script", "iframe", "object", "embed", "base"}
    assert "@import" not in content and "url(" not in content


def test_names_of_others_are_text_on_the_page_and_in_markdown(page: Path) -> None:
    content = page.read_text()
    assert "<script>" not in content
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in content
    text = markdown(page.parent)
    assert "<script>" not in text
    rows = [line for line in text.splitlines() if line.startswith("|") and "alert" in line]
    assert rows and all(re.search(r"(?<!\\)\| \$", line) is None for line in rows)


def test_a_cell_cannot_end_its_row_in_markdown() -> None:
    table = Table("", ("a", "b"), (("x|y\nz", "*`<b>`*"),), 2)
    line = as_markdown([Section("s", "S", tables=(table,))]).splitlines()[-1]
    assert line == r"| x\|y z | \*\`&lt;b&gt;\`\* |"


def browsed(page: Path, *options: str) -> tuple[str, str]:
    """What Chromium makes of it, and what it says."""
    # A short name: a socket lies in it.
    with tempfile.TemporaryDirectory(prefix="us-", ignore_cleanup_errors=True) as profile:
        return _browsed(page, profile, *options)


def _browsed(page: Path, profile: str, *options: str) -> tuple[str, str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": profile, "HOME": profile},
    )
    try:
        out, said = process.communicate(timeout=LONGEST_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session, with all that it has started
        process.wait()
    assert process.returncode in (0, -signal.SIGKILL), said
    return out, said


def complaints(said: str) -> Iterator[str]:
    """Lines of the page's console."""
    return (line for line in said.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
def test_the_page_renders_in_chromium_without_a_word_on_its_console(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    assert list(complaints(browsed(broken, "--dump-dom")[1])), "its console cannot be heard"

    shot = tmp_path / "page.png"
    made, said = browsed(page, "--dump-dom", f"--screenshot={shot}", "--window-size=1200,2000")
    assert list(complaints(said)) == []
    for anchor in ("summary", "gates", "goodput", "gains", "split", "timelines", "recoveries", "machine"):
        assert f'<section id="{anchor}">' in made


def test_each_part_of_the_time_has_a_colour() -> None:
    from understudy.campaigns.report.figures import COLOURS, OTHER

    assert set(COLOURS) == {*PARTS, "unaccounted", OTHER}
    assert Run.model_fields["parts"].is_required() is False
