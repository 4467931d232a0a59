"""Of families of tests that are much alike each run has its share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import drawing
import pytest

HARNESS = Path(drawing.__file__).parent
MADE_UP = """
import pytest

@pytest.mark.drawn(3)
@pytest.mark.parametrize("n", range(10))
def test_alike(n): ...

groups = pytest.mark.parametrize("group", range(6))

@pytest.mark.drawn(3, by="group")
@groups
def test_prepared_together(group): ...

@pytest.mark.drawn(3, by="group")
@groups
@pytest.mark.parametrize("what", "ab")
def test_prepared_together_too(group, what): ...

def test_by_itself(): ...
"""
MADE_UP_FILE = """
import pytest
pytestmark = pytest.mark.drawn(8)

def test_one(): ...
def test_two(): ...
@pytest.mark.drawn(1)
def test_of_each_run(): ...
@pytest.mark.long
def test_long(): ...
"""
SETTINGS = """
[tool.pytest.ini_options]
addopts = "-m 'not long' --strict-markers"
testpaths = ["tests"]
markers = ["long: in full", "drawn(n): one in n"]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "tests").mkdir()
    (root / "tests/test_a.py").write_text(MADE_UP)
    (root / "tests/test_b.py").write_text(MADE_UP_FILE)
    (root / "pyproject.toml").write_text(SETTINGS)
    return root


def run(project: Path, number: int, *words: str, **variables: str) -> str:
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "drawing", "-p", "no:cacheprovider", *words]
    path = os.pathsep.join(map(str, (HARNESS, HARNESS.parent.parent / "bench")))
    known = os.environ | {"PYTHONPATH": path, drawing.VARIABLE: str(number), "PYTEST_ADDOPTS": ""} | variables
    done = subprocess.run(command, cwd=project, env=known, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counts(output: str) -> tuple[int, int, int]:
    """Tests that ran of each family, and of none."""
    ran = [line for line in output.splitlines() if "PASSED" in line]
    alike, of_file, of_groups = (
        sum(name in line for line in ran) for name in ("test_alike", "test_b.py", "together")
    )
    return alike, of_file, len(ran) - alike - of_file - of_groups


def test_each_run_has_its_share_and_the_number_repeats_it(project: Path) -> None:
    first, again = run(project, 7), run(project, 7, "-n", "2")
    assert counts(first) in ((3, 2, 1), (4, 2, 1)), "a third of ten, one of two, and those that always run"
    assert f"drawn by {drawing.VARIABLE}=7" in first and f"drawn by {drawing.VARIABLE}=7" in again
    names = [sorted(re.findall(r"\S+::\S+", line)[0] for line in one.splitlines() if "PASSED" in line)
             for one in (first, again)]  # fmt: skip
    assert names[0] == names[1]


def test_what_is_prepared_together_is_drawn_together(project: Path) -> None:
    ran = [line for line in run(project, 7).splitlines() if "PASSED" in line and "together" in line]
    groups = {group for line in ran for group in re.findall(r"\[(?:\w-)?(\d)\]", line)}
    assert len(ran) == 2 * (1 + 2) and len(groups) == 2


@pytest.mark.parametrize("words", [["tests/test_a.py"], ["-m", "long or not long"]], ids=" ".join)
def test_who_says_which_tests_has_all_of_them(project: Path, words: list[str]) -> None:
    output = run(project, 7, *words)
    assert counts(output)[0] == 10 and "drawn by" not in output


def test_a_run_that_starts_everything_anew_has_all_of_them(project: Path) -> None:
    assert counts(run(project, 7, UNDERSTUDY_TEST_COLD="1")) == (10, 3, 1)


def test_many_runs_see_all_of_a_family() -> None:
    family = [f"test_a.py::test_alike[{n}]" for n in range(10)]
    seen = [drawing.drawn("f", family, 4, str(number)) for number in range(60)]
    assert {len(one) for one in seen} == {2, 3} and set().union(*seen) == set(family)
    assert 120 < sum(len(one) for one in seen) < 180
    backwards = drawing.drawn("f", family[::-1], 4, "7")
    assert backwards == drawing.drawn("f", family, 4, "7"), "in whatever order they come"
    alone = [drawing.drawn("f", ["only"], 2, str(number)) for number in range(60)]
    assert 15 < sum(len(one) for one in alone) < 45, "who is alone has its turns"


def test_of_a_family_with_a_least_each_run_has_that_many_and_many_runs_all() -> None:
    family = [f"test_a.py::test_{n}" for n in range(3)]
    seen = [drawing.drawn("f", family, 8, str(number), least=1) for number in range(60)]
    assert {len(one) for one in seen} == {1} and set().union(*seen) == set(family)
    assert len(drawing.drawn("f", family, 1, "7", least=1)) == 3
    assert len(drawing.drawn("f", ["only"], 8, "7", least=2)) == 1, "no more than there are"
