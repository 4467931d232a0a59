"""deploy/supervise and deploy/slurm, really carried out: a job's proxyd begins with it and leaves nothing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import proxied
import psutil
import pytest
from proxied import WORKLOADS, left_behind, until
from training_run import BIN, ROOT, installed

pytestmark = pytest.mark.drawn(16)

DEPLOY = ROOT / "deploy"
NOBODY = 65534


@dataclass
class SlurmNode:
    """As slurmd runs its scripts: root, no search path, little else."""

    folder: Path
    job: str = "4711"
    uid: int = os.getuid()
    partition: str = "understudy"

    def __post_init__(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir()
        for name in ("proxyd", "recoveryctl"):
            (programs / name).symlink_to(BIN / name)
        (programs / "supervise").symlink_to(DEPLOY / "supervise")
        self.settings(DEVICES="cpu:1", PROXYD_OPTIONS="--spares 0")

    def settings(self, **values: str) -> None:
        """The example of deploy/slurm, with other values."""
        given = {"PROGRAMS": f"{self.folder}/bin", "RUN": f"{self.folder}/run", "LOGS": f"{self.folder}/log"}
        lines = [f"{name}={shlex.quote(value)}" for name, value in (given | values).items()]
        example = (DEPLOY / "slurm" / "slurm.env").read_text()
        (self.folder / "slurm.env").write_text("\n".join([example, *lines, ""]))

    def program(self, name: str, script: str) -> None:
        """A stand-in for one of ours."""
        (self.folder / "bin" / name).unlink()
        (self.folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def script(self, name: str, **more: str) -> str:
        """Runs prolog or epilog to the end; what it said."""
        environment = {
            "SLURM_JOB_ID": self.job, "SLURM_JOB_UID": str(self.uid), "SLURM_JOB_PARTITION": self.partition,
            "PROXYD_SETTINGS": str(self.folder / "slurm.env"),
        }  # fmt: skip
        done = subprocess.run(
            ["/usr/bin/env", "bash", str(DEPLOY / "slurm" / f"{name}.sh")], env=environment | more,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout  # anything else drains the node
        return done.stdout

    @property
    def socket(self) -> Path:
        return self.folder / "run" / f"slurm-{self.job}" / "proxyd.sock"

    @property
    def pid_file(self) -> Path:
        return self.folder / "run" / f"slurm-{self.job}.pid"

    def supervisor(self) -> psutil.Process:
        return psutil.Process(int(self.pid_file.read_text().split()[0]))

    def log(self) -> str:
        return (self.folder / "log" / f"slurm-{self.job}.log").read_text()

    def status(self) -> dict[str, object]:
        command = [*installed("recoveryctl"), "status", "--json", "--socket", str(self.socket)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
        return answer

    def assert_nothing_left(self) -> None:
        assert list((self.folder / "run").iterdir()) == []
        assert left_behind() == []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SlurmNode]:
    made = SlurmNode(tmp_path)
    yield made
    made.script("epilog")


def hanging(node: SlurmNode) -> subprocess.Popen[str]:
    """A training in the job that stands at its third step."""
    command = [*installed("proxyrun"), "--socket", str(node.socket)]
    run = subprocess.Popen(
        [*command, *proxied.python(WORKLOADS / "tiny.py", "--fail", "hang")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    output = run.stdout
    assert output is not None
    until(lambda: output.readline().startswith("hanging"), "it hangs")
    return run


def test_a_job_trains_under_the_proxyd_of_its_prolog_and_its_epilog_leaves_nothing(node: SlurmNode) -> None:
    assert node.script("prolog") == ""
    assert stat.S_IMODE(node.socket.parent.stat().st_mode) == 0o700
    drill = ("--drill", "kill-server rank=0 step=3 call=4")
    script = proxied.python(WORKLOADS / "tiny.py")
    run = subprocess.run(
        [*installed("proxyrun"), "--job", "slurm-4711", *drill, *script], capture_output=True, text=True,
        env=os.environ | {"UNDERSTUDY_SOCKET": str(node.socket)}, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and "recovered in" in run.stderr, run.stderr
    assert node.script("epilog") == ""
    assert '"stopping"' in node.log()
    node.assert_nothing_left()


def test_a_jobs_epilog_ends_a_training_that_still_runs(node: SlurmNode) -> None:
    node.script("prolog")
    run = hanging(node)
    node.script("epilog")
    run.terminate()
    run.communicate(timeout=60)
    node.assert_nothing_left()


def test_a_jobs_proxyd_that_is_killed_is_followed_by_one_that_adopts(node: SlurmNode) -> None:
    node.script("prolog")
    run = hanging(node)
    (proxyd,) = node.supervisor().children()
    proxyd.kill()
    until(lambda: "adopted" in node.log() or "starting it again" in node.log(), "it is noticed")
    until(lambda: node.socket.exists() and node.supervisor().children() not in ([], [proxyd]), "another one")
    (adoption,) = until(lambda: answered(node)["adoptions"], "it has adopted")  # type: ignore[misc]
    assert adoption["former_pid"] == proxyd.pid
    run.terminate()
    run.communicate(timeout=60)
    assert node.script("epilog") == ""
    node.assert_nothing_left()


def answered(node: SlurmNode) -> Mapping[str, object]:
    try:
        return node.status()
    except subprocess.CalledProcessError:
        return {"adoptions": []}


def test_what_a_job_leaves_whose_proxyd_and_supervisor_were_killed_is_removed(node: SlurmNode) -> None:
    node.script("prolog")
    run = hanging(node)
    supervisor = node.supervisor()
    (proxyd,) = supervisor.children()
    for process in (supervisor, proxyd):
        process.suspend()  # so that neither sees the other's end
    for process in (supervisor, proxyd):
        process.kill()
    run.terminate()
    assert "had been killed" in node.script("epilog")
    run.communicate(timeout=60)
    node.assert_nothing_left()


def test_a_supervisor_that_is_killed_takes_proxyd_along_in_order(node: SlurmNode) -> None:
    node.script("prolog")
    (proxyd,) = node.supervisor().children()
    node.supervisor().kill()
    until(lambda: not proxyd.is_running() or proxyd.status() == psutil.STATUS_ZOMBIE, "proxyd has ended")
    assert '"stopping"' in node.log()
    node.script("epilog")
    node.assert_nothing_left()


def test_jobs_of_other_partitions_get_none(node: SlurmNode) -> None:
    node.partition = "debug"
    assert node.script("prolog") == ""
    assert not (node.folder / "run").exists()


def test_a_proxyd_that_cannot_start_is_told_of_and_does_not_drain_the_node(node: SlurmNode) -> None:
    node.settings(DEVICES="tpu:1")
    assert "does not answer" in node.script("prolog")
    assert "unknown device spec 'tpu:1'" in node.log()
    node.script("epilog")
    node.assert_nothing_left()


@pytest.mark.parametrize("job", ["", "../../etc", "1 2", "x"])
def test_a_job_id_that_is_no_number_names_no_path(node: SlurmNode, job: str) -> None:
    node.job = job
    assert "nothing is done" in node.script("prolog")
    assert "nothing is done" in node.script("epilog")
    assert not (node.folder / "run").exists()
    node.job = "1"


def test_the_jobs_gpus_are_its_proxyds_devices(node: SlurmNode) -> None:
    """There is no GPU here: what it would be started with is what counts."""
    node.program("proxyd", 'echo "$CUDA_VISIBLE_DEVICES $*"')
    node.script("prolog", SLURM_JOB_GPUS="4,5,7")
    assert node.log().startswith("4,5,7 --devices cuda:3 --socket")
    assert "no list of numbers" in node.script("epilog", SLURM_JOB_GPUS="$(reboot)")


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of others")
def test_the_proxyd_of_a_job_is_its_users_and_nobody_elses(node: SlurmNode) -> None:
    node.uid = NOBODY
    for folder in [node.folder, *list(node.folder.parents)[:3]]:
        folder.chmod(folder.stat().st_mode | 0o055)  # pytest's are the owner's alone
    if not all(folder.stat().st_mode & 0o001 for folder in node.folder.parents):
        pytest.skip("the directory for temporary files is closed to other users")
    # Others may not read this installation everywhere: stand-ins say who they are.
    node.program("proxyd", 'id --user; id --groups; touch "$HOME/proxyd.sock"; exec sleep 600')
    node.program("recoveryctl", 'test -e "$HOME/proxyd.sock"')
    assert node.script("prolog") == ""
    assert node.log().split() == [str(NOBODY), str(NOBODY)]
    assert node.supervisor().uids().real == NOBODY
    assert os.stat(node.socket).st_uid == os.stat(node.socket.parent).st_uid == NOBODY
    assert os.stat(node.pid_file).st_uid == 0  # what root sends signals by
    node.socket.unlink()
    assert node.script("epilog") == ""
    node.assert_nothing_left()


# ------------------------------------------------------------------ supervise
def supervise(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(DEPLOY / "supervise"), *command], capture_output=True, text=True, timeout=60, check=False
    )


def test_supervise_passes_on_an_exit_status_and_starts_nothing_again() -> None:
    assert supervise("sh", "-c", "exit 2").returncode == 2
    assert supervise().returncode == 2
    assert supervise("/no/such/proxyd").returncode == 127


def test_supervise_gives_up_what_is_killed_again_and_again(tmp_path: Path) -> None:
    done = supervise("sh", "-c", f"echo >>{tmp_path}/started; kill -KILL $$")
    assert done.returncode == 128 + signal.SIGKILL
    assert len((tmp_path / "started").read_text()) == 21
    assert "more than 20 times" in done.stderr


def test_supervise_that_is_told_to_stop_ends_with_the_status_of_what_it_runs() -> None:
    script = "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done"
    supervisor = subprocess.Popen(
        [str(DEPLOY / "supervise"), "bash", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "up\n"
    supervisor.terminate()
    assert supervisor.wait(30) == 7
