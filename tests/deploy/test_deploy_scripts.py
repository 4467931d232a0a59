"""deploy/: scripts that a shell and shellcheck accept, an image made of what there is, lines that fit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_run import BIN, ROOT

DEPLOY = ROOT / "deploy"
SCRIPTS = [DEPLOY / "supervise", *sorted((DEPLOY / "slurm").glob("*.sh")), *sorted(DEPLOY.rglob("*.sbatch"))]
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
IMAGE = DEPLOY / "container" / "Containerfile"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_and_shellcheck_finds_nothing(script: Path) -> None:
    for command in (["bash", "-n"], [str(BIN / "shellcheck"), "--external-sources"]):
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lines_fit_a_screen(path: Path) -> None:
    assert [line for line in path.read_text().splitlines() if len(line) > 110] == []


# ------------------------------------------------------------------ the image, which cannot be built here
def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, lines that go on put together."""
    text = re.sub(r"^#.*\n", "", IMAGE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_is_made_of_what_there_is() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "**"  # only what is named below gets in
    for line in ignored:
        assert not line.startswith("!") or (ROOT / line[1:]).exists(), line
    for name, rest in instructions():
        assert name in {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}
        if name == "COPY" and not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source == "." or f"!{source}" in ignored


def test_what_the_image_installs_is_what_the_project_asks_for(tmp_path: Path) -> None:
    (line,) = [rest for name, rest in instructions() if name == "RUN" and "tomllib" in rest]
    command = line.partition(" && ")[0].removesuffix(" > requirements").replace("python", sys.executable, 1)
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=ROOT, check=True
    )  # as RUN does
    wanted = done.stdout.split("\n")
    assert any(one.startswith("scikit-build-core") for one in wanted)
    assert any(one.startswith("grpcio>=") for one in wanted) and any(one.startswith("s3fs") for one in wanted)
    assert not any(one.startswith("torch") for one in wanted)


def test_the_image_runs_as_the_user_that_the_manifests_name() -> None:
    assert ("USER", "10001:10001") in instructions()
    assert any("--uid 10001" in rest for name, rest in instructions() if name == "RUN")
