"""deploy/install-criu: what it refuses, and (where packages can be had) that what it installs works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from places import ROOT

from understudy.recovery.machine.criu import look_at

SCRIPT = ROOT / "deploy" / "install-criu"


def install(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    done = install("--prefix", str(tmp_path))
    assert done.returncode == 2
    assert "holds something else" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nonsense"], "there is no option --nonsense"),
        (["--prefix"], "--prefix needs a value"),
        (["--suite", "tri'xie"], "odd characters"),
        (["--suite", 'x";rm'], "odd characters"),
        (["--keyring", "/no/such/keyring"], "cannot read /no/such/keyring"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = install(*arguments, *(["--prefix", str(tmp_path / "new")] if arguments[-1] != "--prefix" else []))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_recent_criu_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    criu = tmp_path / "bin" / "criu"
    criu.write_text("#!/bin/sh\necho Version: 4.3\n")
    criu.chmod(0o755)
    done = install("--prefix", str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, f"{criu} is CRIU 4.3 already")


def test_an_index_that_is_not_signed_by_debian_is_not_believed(tmp_path: Path) -> None:
    release = tmp_path / "mirror" / "dists" / "trixie"
    release.mkdir(parents=True)
    (release / "Release").write_text("Origin: Debian\nSuite: trixie\nCodename: trixie\nComponents: main\n")
    done = install("--prefix", str(tmp_path / "criu"), "--mirror", f"file:{tmp_path}/mirror")
    if "is needed: on a system without it" in done.stderr or "install debian-archive-keyring" in done.stderr:
        pytest.skip("no apt or no keyring of Debian here")
    assert done.returncode == 2
    assert "cannot be had, or is not signed" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mirror"], "nothing is left of the attempt"


@pytest.mark.long
def test_what_is_installed_starts_and_says_its_version(tmp_path: Path) -> None:
    done = install("--prefix", str(tmp_path / "criu"), timeout_s=200)
    if done.returncode == 2 and "cannot be had" in done.stderr:
        pytest.skip("no mirror of Debian's packages can be reached")
    assert done.returncode == 0, done.stderr
    assert look_at(tmp_path / "criu" / "bin" / "criu", "").recent
    assert "already" in install("--prefix", str(tmp_path / "criu")).stdout
