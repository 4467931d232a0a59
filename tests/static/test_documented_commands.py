"""Every command line of ours in docs/operate/ and deploy/ is one that its program takes, and works.

Those in sentences of docs/tutorial.md are at least taken; its others are typed by test_tutorial.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import proxied
import pytest
import yaml
from documented_commands import OPERATE, STORED, TUTORIAL, check, of_page, of_script
from manifests import pods, words
from migratable_run import skip_without_criu
from proxied import left_behind, until
from running_proxyd import running_proxyd
from training_run import ROOT, installed

DEPLOY = ROOT / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "understudy.rules.yaml").read_text())["groups"][0]["rules"]


def lines() -> Iterator[tuple[str, str]]:
    """Where from, and what."""
    for page in OPERATE:
        yield from ((page.name, line) for line in of_page(page))
    yield from (("tutorial.md", line) for line in of_page(TUTORIAL) if "--version" not in line)
    for path in sorted([*DEPLOY.rglob("*.sbatch"), *DEPLOY.rglob("*.sh")]):
        yield from ((path.name, line) for line in of_script(path))
    for pod in pods():
        for name in ("proxyd", "proxyrun"):
            if container := pod.container(name):
                line = shlex.join(words(container)).replace("supervise ", "")
                yield (
                    pod.path.name,
                    line.replace("/snapshots", STORED).replace("/host/var/lib/understudy" + STORED, STORED),
                )


LINES = list(dict.fromkeys(lines()))
LEFT_TO_THE_READER = re.compile(r"\b(DEVICE|DIR|HOST)\b")
"""What a command is about, in sentences: nothing here has such a name."""


@pytest.mark.parametrize(("where", "line"), LINES, ids=lambda text: text[:60])
def test_a_documented_command_line_is_accepted(where: str, line: str, tmp_path: Path) -> None:
    check(line, tmp_path)


def test_all_of_them_were_found() -> None:
    told = {where for where, _ in LINES}
    assert {"install.md", "train.sbatch", "train-with-prolog.sbatch", "node-daemonset.yaml"} <= told
    assert len(LINES) > 25


@pytest.mark.parametrize(
    "line",
    ["proxyd --devices cpu:2 --persists /tmp", "proxyrun --drill 'melt rank=1' true", "recoveryctl drills",
     "recoveryctl snapshots export", "proxyd --devices cpu:2 --mirror s3://bucket/prefix"],
)  # fmt: skip
def test_a_wrong_command_line_would_be_noticed(line: str, tmp_path: Path) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(line, tmp_path)


def test_every_alert_is_explained_to_the_person_on_call() -> None:
    told = "".join(page.read_text() for page in OPERATE)
    assert [rule["alert"] for rule in ALERTS if f"`{rule['alert']}`" not in told] == []


def test_every_page_of_the_folder_is_looked_at() -> None:
    assert sorted(OPERATE) == sorted((ROOT / "docs" / "operate").glob("*.md"))


def test_files_of_deploy_that_are_named_are_there() -> None:
    for page in OPERATE:
        for path in re.findall(r"deploy/[\w./-]+", page.read_text()):
            assert (ROOT / path).exists(), path


@pytest.mark.long  # minutes on a busy machine; each of the drills has tests of its own
@pytest.mark.timeout(600)
def test_what_the_person_on_call_is_told_to_ask_of_a_training_is_answered(tmp_path: Path) -> None:
    """All recoveryctl commands of the pages, in their order, on a training that goes on."""
    stored, mirror, socket = tmp_path / "stored", tmp_path / "mirror", tmp_path / "socket"
    mirror.mkdir()  # as a mount point is
    options = ["--persist", str(stored), "--persist-every", "5steps", "--persist-only"]
    options += ["--mirror", f"file://{mirror}"]
    skip_without_criu()
    with running_proxyd(socket, 3, tuple(options)) as proxyd:  # one device more than ranks: they move about
        environment = os.environ | {"UNDERSTUDY_SOCKET": str(proxyd.socket), "OMP_NUM_THREADS": "1"}

        def control(line: str) -> subprocess.CompletedProcess[str]:
            line = line.replace(STORED, str(stored)).replace("s3://bucket/prefix", f"file://{mirror}")
            line = line.replace("/mnt/nvme/snapshots", str(stored))
            line = line.replace("--to cpu:2", "--to cpu:1")  # the drain before it has brought it to cpu:2
            line = line.replace("/run/understudy/own/proxyd.sock", str(socket))
            line = line.replace("/run/understudy/proxyd.sock", str(socket)).replace("RANK", "0")
            return subprocess.run(
                [*installed("recoveryctl"), *shlex.split(line)[1:]], env=environment, cwd=tmp_path,
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip

        script = proxied.torchrun(2, ROOT / "examples" / "char_gpt.py", "--steps", "1000000")
        run = subprocess.Popen(
            [*installed("proxyrun"), "--job", "nightly", "--migratable", *script],
            env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            listed = "recoveryctl snapshots list s3://bucket/prefix --json"
            until(
                lambda: '"complete": true' in control(listed).stdout,
                "a complete snapshot, in both tiers",
                120,
            )
            commands = [line for page in OPERATE for line in of_page(page) if line.startswith("recoveryctl")]
            for line in dict.fromkeys(commands):
                if "--watch" in line or "kill-proxyd" in line or "tune" in line:
                    continue  # endless; ends this very proxyd; half a minute, in test_snapshot_tune
                if "node-" in line or line == "recoveryctl drill":
                    continue  # other hosts: test_jobs_on_hosts; the name of a command
                if LEFT_TO_THE_READER.search(line):
                    continue
                done = control(line)
                assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        finally:
            run.terminate()
            run.wait(60)
    assert left_behind() == []
